"""`mrl train CONFIG`: train, from the beginning or from the run's newest checkpoint."""

from __future__ import annotations

import argparse
import gc
import sys
from contextlib import ExitStack
from pathlib import Path

from mrl.cli.supervise import ATTEMPT, EXIT_LOST, EXIT_NO_PLACE, supervise
from mrl.config.load import Resolved, load_config
from mrl.config.model_names import settle_models
from mrl.config.schema import Config
from mrl.errors import PlacementError, TooFewDevices, WorkerDied, WorkerSilent
from mrl.plan.search import fits_on
from mrl.preflight.findings import refuse

EXAMPLE = "mrl train configs/laptop-ppo.yaml model.path=my-model training.steps=20"
EXIT_STOPPED = 75  # sysexits.h calls it a temporary failure: the same command goes on


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """CONFIG and its overrides."""
    parser.add_argument("config", metavar="CONFIG", help="a YAML file")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="values that replace those of the file")
    parser.add_argument("--quiet", action="store_true", help="no line per step")
    parser.add_argument(ATTEMPT, action="store_true", help=argparse.SUPPRESS)  # watched by `supervise`


def run(arguments: argparse.Namespace) -> int:
    """Train; 0 when all steps are done, EXIT_STOPPED when the run was asked to stop before and has saved."""
    resolved = load_config(arguments.config, arguments.overrides)
    config = resolved.config
    if not arguments.attempt and config.training.max_restarts:
        again = [arguments.config, *arguments.overrides, *(["--quiet"] if arguments.quiet else [])]
        return supervise(again, Path(config.run.dir, config.run.name), config.training.max_restarts)
    try:
        return _train(resolved, quiet=arguments.quiet)
    except (WorkerDied, WorkerSilent, PlacementError) as error:
        if isinstance(error, TooFewDevices):
            error.fix = "\n".join([error.fix, *fits_on(resolved, error.num_nodes)])
        if not arguments.attempt:
            raise
        print(resolved.secrets.hide(str(error)), file=sys.stderr)
        return EXIT_NO_PLACE if isinstance(error, PlacementError) else EXIT_LOST


def _train(resolved: Resolved[Config], *, quiet: bool) -> int:
    # These load torch and Ray, which a wrong configuration need not wait for.
    from mrl.controller.cluster import ray_cluster_soon
    from mrl.observe.console import Console
    from mrl.preflight.machine import check_start

    warnings = refuse(resolved.path, check_start(resolved.config))
    resolved = settle_models(resolved)
    config = resolved.config
    console = Console(config.training.steps, quiet=quiet)
    with ExitStack() as stack:
        if config.cluster.ray_address is None:
            stack.enter_context(ray_cluster_soon(config.cluster))
        gc.disable()  # what is loaded from here on stays
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
        console.print(f"{trainer.num_steps_done} steps done; everything is in {opened.directory}")
    return 0 if trainer.num_steps_done == config.training.steps else EXIT_STOPPED
