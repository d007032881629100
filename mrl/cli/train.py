"""`mrl train CONFIG`: train from the beginning or from the run's newest checkpoint, and again after a loss."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mrl.cli.arguments import add_config_first
from mrl.cli.supervise import Lost, add_attempt, finished, watched
from mrl.config.resolved.load import Resolved, load_config, settle_models
from mrl.config.resolved.run_directory import CHECKPOINTS, steps_in
from mrl.config.schema import Config
from mrl.errors import EXIT_STOPPED, ConfigError, Problem, TooFewDevices
from mrl.plan.search import fits_on
from mrl.preflight.findings import refuse

if TYPE_CHECKING:
    from mrl.trainer.ppo import RayPPOTrainer

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
    if resolved.config.training.samples_from is not None:
        _check_samples(resolved.config)
    with started(resolved, lost, quiet) as trainer:
        trainer.fit()
        trainer.run.console.print(f"{trainer.num_steps_done} steps done; all files are in {trainer.run.directory}")
    return 0 if trainer.num_steps_done == resolved.config.training.steps else EXIT_STOPPED


@contextmanager
def started(resolved: Resolved[Config], lost: Lost, quiet: bool) -> Iterator[RayPPOTrainer]:
    """Start a run's Ray and workers, for the length of the block."""
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
            yield trainer


def _check_samples(config: Config) -> None:
    """Raise an error unless the samples of all steps are recorded."""
    from mrl.trainer.recorded_samples import check_recorded

    source, done = Path(str(config.training.samples_from)), steps_in(Path(config.run.dir, config.run.name, CHECKPOINTS))
    first = 1 + (done[-1] if done and config.training.resume == "auto" else 0)
    check_recorded(source, first, config.training.steps)
