"""Starts a run again when it has lost a worker or a node: a process that watches another, and loads nothing heavy.

A loop inside the run would not do: when a cluster's head dies, Ray ends every process that has joined it.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from mrl.config.run_directory import CHECKPOINTS, steps_in
from mrl.events import EventLog, RunRestarted

EXIT_LOST, EXIT_NO_PLACE = 76, 77
"""What a watched run leaves with when it lost a worker or a node, and when there were too few devices to start."""
ATTEMPT = "--attempt"
_MAIN = "import sys; from mrl.cli.main import main; sys.exit(main())"
_FORWARDED = (signal.SIGTERM, signal.SIGUSR1)


def supervise(arguments: Sequence[str], directory: Path, max_restarts: int) -> int:
    """Run `mrl train` with these arguments, again after each loss; the exit code of the last attempt.

    Restarts count from the newest checkpoint on: a run that gets further may be restarted as often again.
    """
    num_restarts, newest, has_begun = 0, _newest(directory), False
    while True:
        code = _attempt([sys.executable, "-c", _MAIN, "train", *arguments, ATTEMPT])
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
    """The step of the newest checkpoint; 0 where there is none."""
    return max(steps_in(directory / CHECKPOINTS), default=0)


def _attempt(command: Sequence[str]) -> int:
    with subprocess.Popen(command) as run, _forwarding_to(run):
        return run.wait()


@contextmanager
def _forwarding_to(run: subprocess.Popen[bytes]) -> Iterator[None]:
    """What asks the watcher to save and stop is meant for the run. Ctrl-C reaches it by the terminal."""

    def forward(number: int, frame: FrameType | None) -> None:
        run.send_signal(number)

    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
