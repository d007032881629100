"""`mrl train CONFIG`: train from the beginning or from the run's newest checkpoint, and again after a loss."""

from __future__ import annotations

import argparse
import gc
from contextlib import ExitStack
from pathlib import Path

from mrl.cli.arguments import add_config_first
from mrl.cli.supervise import Lost, add_attempt, finished, watched
from mrl.config.resolved.load import Resolved, load_config, settle_models
from mrl.config.schema import Config
from mrl.errors import EXIT_STOPPED, ConfigError, Problem, TooFewDevices
from mrl.plan.search import fits_on
from mrl.preflight.findings import refuse

EXAMPLE = "mrl train configs/laptop-ppo.yaml model.path=my-model training.steps=20"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_first(parser, optional=True)
    parser.add_argument("--replay", metavar="RUN", help="repeat, bit for bit, a run with weights in flight")
    parser.add_argument("--quiet", action="store_true", help="print no line per step")
    add_attempt(parser)


def run(arguments: argparse.Namespace) -> int:
    """Train. Return 0 if all steps are done, or EXIT_STOPPED if the run was asked to stop and has saved."""
    if arguments.replay:
        _replay(arguments)
    elif not arguments.config:
        fix = "mrl train CONFIG, or mrl train --replay RUN"
        raise ConfigError([Problem("command line", "", "no configuration is given", fix)])
    resolved = load_config(arguments.config, arguments.overrides)
    if (newest := finished(resolved, resolved.config.training.steps)) is not None:
        print(f"all {resolved.config.training.steps} steps are done; the newest checkpoint is {newest}")
        return 0
    return watched("train", arguments, resolved, lambda lost: _train_here(resolved, lost, arguments.quiet))


def _replay(arguments: argparse.Namespace) -> None:
    """Set the configuration of the replayed run, and a run name next to it, from the arguments."""
    run = Path(arguments.replay)
    first = [arguments.config] if arguments.config else []
    names = [f"asynchrony.replay={run}", f"run.name={run.name}-replay", f"run.dir={run.parent}"]
    arguments.config, arguments.overrides = str(run / "config.yaml"), [*names, *first, *arguments.overrides]


def _train_here(resolved: Resolved[Config], lost: Lost, quiet: bool) -> int:
    try:
        return _train(resolved, lost, quiet)
    except TooFewDevices as error:
        error.fix = "\n".join([error.fix, *fits_on(resolved, error.num_nodes)])
        raise


def _train(resolved: Resolved[Config], lost: Lost, quiet: bool) -> int:
    # These load torch and Ray. A wrong configuration fails before.
    from mrl.controller.cluster import ray_cluster_soon, when_ray_is_lost
    from mrl.observe.console import Console
    from mrl.preflight.machine import check_start

    warnings = refuse(resolved.path, check_start(resolved))
    resolved = settle_models(resolved)
    config = resolved.config
    console = Console(config.training.steps, quiet=quiet)
    with ExitStack() as stack:
        stack.enter_context(when_ray_is_lost(lost))
        if config.cluster.ray_address is None:
            stack.enter_context(ray_cluster_soon(config.cluster))
        gc.disable()  # objects loaded from here on stay in memory
        stack.callback(gc.enable)
        from mrl.trainer.ppo import RayPPOTrainer
        from mrl.trainer.run import open_run

        opened = stack.enter_context(open_run(resolved, console))
        for warning in warnings:
            opened.warn(warning.about, f"{warning.what} ({warning.fix})")
        trainer = RayPPOTrainer(opened)
        with trainer.init_workers():
            gc.freeze()
            gc.enable()
            trainer.fit()
        console.print(f"{trainer.num_steps_done} steps done; all files are in {opened.directory}")
    return 0 if trainer.num_steps_done == config.training.steps else EXIT_STOPPED
