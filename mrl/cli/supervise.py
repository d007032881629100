"""How a command ends: by Ctrl-C within seconds, and a run, once it has lost a worker or a node, to be started again.

The process that watches a run loads nothing heavy. A loop inside the run would not do: when a cluster's head dies, Ray
ends every process that has joined it.
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
from mrl.config.load import AnyTyped, Resolved, config_kind
from mrl.config.run_directory import CHECKPOINTS, EVENTS, steps_in
from mrl.errors import MrlError, PlacementError, WorkerDied, WorkerSilent
from mrl.events import Event, EventLog, RayLost, RunEnded, RunRestarted, last_ending

EXIT_LOST, EXIT_NO_PLACE, EXIT_FAILED = 76, 77, 78
"""What a watched run leaves with when it lost a worker or a node, when there were too few devices to start, and when
it failed and has said so. Ray ends a process whose raylet goes with 1, at times before that can say a word."""
ATTEMPT = "--attempt"
_LOOKS_AGAIN_S = 2.0
_FORWARDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)


def add_attempt(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(ATTEMPT, action="store_true", help=argparse.SUPPRESS)


def finished(resolved: Resolved[AnyTyped], num_steps: int | None) -> Path | None:
    """Return the newest checkpoint of a run that has done this many steps and would go on; None where it has not."""
    directory = Path(resolved.config.run.dir, resolved.config.run.name)
    is_done = num_steps is not None and _newest(directory) >= num_steps and resolved.config.training.resume == "auto"
    if not is_done or config_kind(str(directory / "config.yaml")) is not type(resolved.config):
        return None
    from mrl.trainer.checkpoints import find_checkpoint  # which loads torch

    return find_checkpoint(directory / CHECKPOINTS, "latest")


Lost = Callable[[WorkerDied], int]
"""Says that the run's Ray is lost; returns the exit code."""


def watched(verb: str, arguments: argparse.Namespace, resolved: Resolved[AnyTyped], go: Callable[[Lost], int]) -> int:
    """Do it, or have it done in processes that are watched where training.max_restarts wants that; the exit code."""
    config = resolved.config
    directory = Path(config.run.dir, config.run.name)
    if not arguments.attempt and config.training.max_restarts:
        again = [verb, arguments.config, *arguments.overrides, *(["--quiet"] if arguments.quiet else [])]
        resources_s, fallback = config.deadlines.resources_s, config.training.fallback
        with on_interrupt(lambda: f"interrupted: {what_is_kept(directory)}"):
            return supervise(again, directory, config.training.max_restarts, resources_s, fallback)

    def lost(error: WorkerDied) -> int:
        """Say and write down what ends this run, whose threads all wait for Ray."""
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
    """Run `mrl` with this verb and its arguments, again after each loss; the exit code of the last attempt.

    Restarts count from the newest checkpoint on: a run that gets further may be restarted as often again. One that
    finds no cluster is made again until `resources_s` after the loss; from then on with the overrides of `fallback`.
    """
    num_restarts, newest, has_begun, lost_at = 0, _newest(directory), False, 0.0
    while True:
        code = _attempt([sys.executable, "-m", "mrl.cli.main", *command, ATTEMPT])
        if code == -signal.SIGINT:  # before it could say a word
            print(f"interrupted: {what_is_kept(directory)}", file=sys.stderr)
            return EXIT_INTERRUPTED
        # Too few devices are a mistake at first; later, a node is missing that may come back.
        if code >= 0 and code not in (1, EXIT_LOST) and not (has_begun and code == EXIT_NO_PLACE):
            return 1 if code in (EXIT_NO_PLACE, EXIT_FAILED) else code
        if code == EXIT_NO_PLACE and time.monotonic() - lost_at < resources_s:
            time.sleep(_LOOKS_AGAIN_S)
            continue
        has_begun, lost_at, reached = True, time.monotonic(), _newest(directory)
        if reached < newest:  # somebody has removed the run, and wants no other
            return 1
        num_restarts = num_restarts + 1 if reached == newest else 1
        newest = reached
        lost = {EXIT_NO_PLACE: "found no place", 1: "left with status 1"}.get(code, "lost a worker or a node")
        if code == EXIT_NO_PLACE and fallback:
            lost = f"found no place, and goes on with {shlex.join(fallback)}"
            command, fallback = [*command, *fallback], ()
        why = f"was ended by {signal.Signals(-code).name}" if code < 0 else lost
        _write_ending(directory, "killed", why)
        if num_restarts > max_restarts:
            print(f"the run {why}, and training.max_restarts={max_restarts} is used up", file=sys.stderr)
            return 128 - code if code < 0 else 1
        going_on = f"restart {num_restarts} of {max_restarts}, from step {newest}"
        print(f"the run {why}: {going_on}", file=sys.stderr, flush=True)
        _write(directory, RunRestarted(why, num_restarts, newest))


def _write(directory: Path, event: Event) -> None:
    """Write an event of a run, where it came to having a directory."""
    if directory.is_dir():
        events = EventLog(directory / EVENTS)
        events.write(event)
        events.close()


def _write_ending(directory: Path, cause: str, why: str) -> None:
    """Write how a run ended that had no time to write it itself."""
    path = directory / EVENTS
    try:
        is_written = not path.is_file() or last_ending(path) is not None
    except MrlError:  # a file of another version: an ending too many is better than none
        is_written = False
    if not is_written:
        _write(directory, RunEnded(cause, why, _newest(directory)))


def _newest(directory: Path) -> int:
    """Return the step of the newest checkpoint; 0 where there is none."""
    return max(steps_in(directory / CHECKPOINTS), default=0)


def _attempt(command: Sequence[str]) -> int:
    # What is sent to the group reaches the run once, from here. Whoever kills this process wants the run to end, and
    # one that saved first would hold its directory against the next.
    die = partial(die_with, os.getpid())
    run = subprocess.Popen(command, start_new_session=True, preexec_fn=die)
    # What asks the watcher to stop is meant for the run, which has a session of its own.
    with run, listening(_FORWARDED, lambda number, frame: run.send_signal(number)):
        return run.wait()


EXIT_INTERRUPTED = 130
"""As a shell reports SIGINT."""
_UNWINDS_S = 3.0
_AGAIN_S = 0.5
"""One Ctrl-C may come twice: from the terminal, and from a parent that forwards it."""


@contextmanager
def on_interrupt(say: Callable[[], str], forced: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Unwind at the first Ctrl-C, for some seconds; end at once at the second, after `forced`.

    Checkpoints are whole at any moment, and what keeps Ray and the reward workers ends them with this process.
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
        os.write(2, f"\n{say()}\n".encode(errors="backslashreplace"))  # a print may be what it has interrupted
        limit = threading.Timer(_UNWINDS_S, end)
        limit.daemon = True
        limit.start()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is handle and not began:  # a block within has begun to unwind
            signal.signal(signal.SIGINT, before)


_MAIN = threading.main_thread()


def what_is_kept(directory: Path) -> str:
    """Return where the same command goes on that has run in this directory."""
    if not (steps := steps_in(directory / CHECKPOINTS)):
        return f"{directory} has no checkpoint: the same command begins again"
    return f"the newest checkpoint is that of step {steps[-1]}: the same command goes on from step {steps[-1] + 1}"
