"""How a command ends: within seconds after Ctrl-C; a run is restarted after it lost a worker or a node.

The process that watches a run loads nothing heavy. A loop inside the run would not work: when the head of a cluster
dies, Ray ends every process that has joined it.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType

from mrl.children import die_with, listening
from mrl.config.resolved.load import AnyTyped, Resolved, config_kind
from mrl.config.resolved.run_directory import CHECKPOINTS, EVENTS, steps_in
from mrl.errors import MrlError, PlacementError, WorkerDied, WorkerSilent
from mrl.events import Event, EventLog, RayLost, RunEnded, RunRestarted, last_ending

EXIT_LOST, EXIT_NO_PLACE, EXIT_FAILED = 76, 77, 78
"""Exit codes of a watched run: it lost a worker or a node; there were too few devices to start; it failed and has
reported why. When its raylet dies, Ray ends a process with 1, sometimes before the process can report anything."""
ATTEMPT = "--attempt"
_LOOKS_AGAIN_S = 2.0
_FORWARDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)


def add_attempt(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(ATTEMPT, action="store_true", help=argparse.SUPPRESS)


def finished(resolved: Resolved[AnyTyped], num_steps: int | None) -> Path | None:
    """Return the newest checkpoint of a run that has finished this many steps and would resume. Otherwise return
    None."""
    directory = Path(resolved.config.run.dir, resolved.config.run.name)
    is_done = num_steps is not None and _newest(directory) >= num_steps and resolved.config.training.resume == "auto"
    if not is_done or config_kind(str(directory / "config.yaml")) is not type(resolved.config):
        return None
    from mrl.trainer.checkpoints import find_checkpoint  # loads torch

    return find_checkpoint(directory / CHECKPOINTS, "latest")


Lost = Callable[[WorkerDied], int]
"""Reports that the run's Ray is lost, and returns the exit code."""


def watched(verb: str, arguments: argparse.Namespace, resolved: Resolved[AnyTyped], go: Callable[[Lost], int]) -> int:
    """Run `go` here, or in watched processes if training.max_restarts is set. Return the exit code."""
    config = resolved.config
    directory = Path(config.run.dir, config.run.name)
    if not arguments.attempt and config.training.max_restarts:
        again = [verb, arguments.config, *arguments.overrides, *(["--quiet"] if arguments.quiet else [])]
        resources_s, fallback = config.deadlines.resources_s, config.training.fallback
        with on_interrupt(lambda: f"interrupted: {what_is_kept(directory)}"):
            return supervise(again, directory, config.training.max_restarts, resources_s, fallback)

    def lost(error: WorkerDied) -> int:
        """Report and record what ends this run. All of its threads wait for Ray."""
        error.fix = what_is_kept(directory)
        print(resolved.secrets.hide(str(error)), file=sys.stderr, flush=True)
        _write(directory, RayLost(error.what))
        _write_ending(directory, "lost", error.what)
        return EXIT_LOST if arguments.attempt else error.exit_code

    try:
        forced = partial(_write_ending, directory, "interrupted", "Ctrl-C")
        with on_interrupt(lambda: f"interrupted: {what_is_kept(directory)}", forced):
            return go(lost)
    except MrlError as error:
        if not arguments.attempt:
            raise
        print(resolved.secrets.hide(str(error)), file=sys.stderr)
        if isinstance(error, PlacementError):
            return EXIT_NO_PLACE
        if isinstance(error, (WorkerDied, WorkerSilent)):
            return EXIT_LOST
        return EXIT_FAILED if error.exit_code == 1 else error.exit_code


def supervise(
    command: Sequence[str], directory: Path, max_restarts: int, resources_s: float, fallback: Sequence[str] = ()
) -> int:
    """Run `mrl` with this verb and its arguments, again after each loss. Return the exit code of the last attempt.

    Restarts are counted from the newest checkpoint: a run that gets further may be restarted as often again. A run
    without a cluster is restarted until `resources_s` after the loss, and after that with the overrides of `fallback`.
    """
    num_restarts, newest, has_begun, lost_at = 0, _newest(directory), False, 0.0
    while True:
        code = attempt([sys.executable, "-m", "mrl.cli.main", *command, ATTEMPT])
        if code == -signal.SIGINT:  # ended before it could report anything
            print(f"interrupted: {what_is_kept(directory)}", file=sys.stderr)
            return EXIT_INTERRUPTED
        # At first, too few devices are a mistake. Later, a node is missing that may return.
        if code >= 0 and code not in (1, EXIT_LOST) and not (has_begun and code == EXIT_NO_PLACE):
            return 1 if code in (EXIT_NO_PLACE, EXIT_FAILED) else code
        if code == EXIT_NO_PLACE and time.monotonic() - lost_at < resources_s:
            time.sleep(_LOOKS_AGAIN_S)
            continue
        has_begun, lost_at, reached = True, time.monotonic(), _newest(directory)
        if reached < newest:  # someone has removed the run, and wants no new one
            return 1
        num_restarts = num_restarts + 1 if reached == newest else 1
        newest = reached
        lost = {EXIT_NO_PLACE: "did not find enough devices", 1: "exited with status 1"}.get(
            code, "lost a worker or a node"
        )
        if code == EXIT_NO_PLACE and fallback:
            lost = f"did not find enough devices, and continues with {shlex.join(fallback)}"
            command, fallback = [*command, *fallback], ()
        reason = f"was ended by {signal.Signals(-code).name}" if code < 0 else lost
        _write_ending(directory, "killed", reason)
        if num_restarts > max_restarts:
            print(f"the run {reason}, and training.max_restarts={max_restarts} is used up", file=sys.stderr)
            return 128 - code if code < 0 else 1
        restart = f"restart {num_restarts} of {max_restarts}, from step {newest}"
        print(f"the run {reason}: {restart}", file=sys.stderr, flush=True)
        _write(directory, RunRestarted(reason, num_restarts, newest))


def _write(directory: Path, event: Event) -> None:
    """Write an event of a run, if the run has a directory."""
    if directory.is_dir():
        events = EventLog(directory / EVENTS)
        events.write(event)
        events.close()


def _write_ending(directory: Path, cause: str, reason: str) -> None:
    """Record the end of a run that could not record it itself."""
    path = directory / EVENTS
    try:
        is_written = not path.is_file() or last_ending(path) is not None
    except MrlError:  # a file of another version: one ending too many is better than none
        is_written = False
    if not is_written:
        _write(directory, RunEnded(cause, reason, _newest(directory)))


def _newest(directory: Path) -> int:
    """Return the step of the newest checkpoint, or 0 without a checkpoint."""
    return max(steps_in(directory / CHECKPOINTS), default=0)


def attempt(command: Sequence[str]) -> int:
    """Run a command in a separate session, with this process's signals, and return its exit code."""
    # Signals for the process group reach the run once, from here. If this process is killed, the run should end too: a
    # run that saved first would hold its directory against the next one.
    die = partial(die_with, os.getpid())
    run = subprocess.Popen(command, start_new_session=True, preexec_fn=die)
    # Signals to the watcher are meant for the run, which has its own session.
    with run, listening(_FORWARDED, lambda number, frame: run.send_signal(number)):
        return run.wait()


EXIT_INTERRUPTED = 130
"""Exit code that a shell reports for SIGINT."""
_UNWINDS_S = 3.0
_AGAIN_S = 0.5
"""One Ctrl-C may arrive twice: from the terminal, and from a parent that forwards it."""


@contextmanager
def on_interrupt(say: Callable[[], str], forced: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Unwind for some seconds at the first Ctrl-C. End at once at the second, after `forced`.

    Checkpoints are complete at any moment, and Ray and the reward workers end together with this process.
    """
    if signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, None) or threading.current_thread() is not _MAIN:
        yield
        return
    began: list[float] = []

    def end() -> None:
        try:
            forced()
        finally:
            os._exit(EXIT_INTERRUPTED)

    def handle(number: int, frame: FrameType | None) -> None:
        if began:
            if time.monotonic() - began[0] > _AGAIN_S:
                end()
            return
        began.append(time.monotonic())
        os.write(2, f"\n{say()}\n".encode(errors="backslashreplace"))  # a print may be what was interrupted
        limit = threading.Timer(_UNWINDS_S, end)
        limit.daemon = True
        limit.start()
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is handle and not began:  # a nested block has begun to unwind
            signal.signal(signal.SIGINT, previous)


_MAIN = threading.main_thread()


def what_is_kept(directory: Path) -> str:
    """Return where the same command would continue after it has run in this directory."""
    if not (steps := steps_in(directory / CHECKPOINTS)):
        return f"{directory} has no checkpoint: the same command starts again"
    return f"the newest checkpoint is from step {steps[-1]}: the same command continues from step {steps[-1] + 1}"
