"""`mrl train CONFIG`: train, from the beginning or from the run's newest checkpoint, and again after a loss.

What starts a run again is a process that watches another, and loads nothing heavy. A loop inside the run would not do:
when a cluster's head dies, Ray ends every process that has joined it.
"""

from __future__ import annotations

import argparse
import gc
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

from mrl.cli.arguments import add_config_first
from mrl.config.load import Resolved, load_config
from mrl.config.model_names import settle_models
from mrl.config.run_directory import CHECKPOINTS, steps_in
from mrl.config.schema import Config
from mrl.errors import EXIT_STOPPED, PlacementError, TooFewDevices, WorkerDied, WorkerSilent
from mrl.events import EventLog, RunRestarted
from mrl.plan.search import fits_on
from mrl.preflight.findings import refuse

EXAMPLE = "mrl train configs/laptop-ppo.yaml model.path=my-model training.steps=20"
EXIT_LOST, EXIT_NO_PLACE = 76, 77
"""What a watched run leaves with when it lost a worker or a node, and when there were too few devices to start."""
ATTEMPT = "--attempt"
_FORWARDED = (signal.SIGTERM, signal.SIGUSR1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_first(parser)
    parser.add_argument("--quiet", action="store_true", help="no line per step")
    parser.add_argument(ATTEMPT, action="store_true", help=argparse.SUPPRESS)  # watched by `_supervise`


def run(arguments: argparse.Namespace) -> int:
    """Train; return 0 when all steps are done, EXIT_STOPPED when the run was asked to stop before and has saved."""
    resolved = load_config(arguments.config, arguments.overrides)
    config = resolved.config
    if not arguments.attempt and config.training.max_restarts:
        again = [arguments.config, *arguments.overrides, *(["--quiet"] if arguments.quiet else [])]
        return _supervise(again, Path(config.run.dir, config.run.name), config.training.max_restarts)
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

    warnings = refuse(resolved.path, check_start(resolved))
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


def _supervise(arguments: Sequence[str], directory: Path, max_restarts: int) -> int:
    """Run `mrl train` with these arguments, again after each loss; the exit code of the last attempt.

    Restarts count from the newest checkpoint on: a run that gets further may be restarted as often again.
    """
    num_restarts, newest, has_begun = 0, _newest(directory), False
    while True:
        code = _attempt([sys.executable, "-m", "mrl.cli.main", "train", *arguments, ATTEMPT])
        reached = _newest(directory)
        num_restarts = num_restarts + 1 if reached == newest else 1
        newest = reached
        # Too few devices are a mistake at first; later, a node is missing that may come back.
        if code >= 0 and code != EXIT_LOST and not (has_begun and code == EXIT_NO_PLACE):
            return 1 if code == EXIT_NO_PLACE else code
        has_begun = True
        why = f"was ended by {signal.Signals(-code).name}" if code < 0 else "lost a worker or a node"
        if num_restarts > max_restarts:
            print(f"the run {why}, and training.max_restarts={max_restarts} is used up", file=sys.stderr)
            return 128 - code if code < 0 else 1
        print(
            f"the run {why}: restart {num_restarts} of {max_restarts}, from step {newest}", file=sys.stderr, flush=True
        )
        if directory.is_dir():
            events = EventLog(directory / "events.jsonl")
            events.write(RunRestarted(why, num_restarts, newest))
            events.close()


def _newest(directory: Path) -> int:
    """Return the step of the newest checkpoint; 0 where there is none."""
    return max(steps_in(directory / CHECKPOINTS), default=0)


def _attempt(command: Sequence[str]) -> int:
    with subprocess.Popen(command) as run, _forwarding_to(run):
        return run.wait()


@contextmanager
def _forwarding_to(run: subprocess.Popen[bytes]) -> Iterator[None]:
    """Send on what asks the watcher to save and stop: it is meant for the run. Ctrl-C reaches it by the terminal."""

    def forward(number: int, frame: FrameType | None) -> None:
        run.send_signal(number)

    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
