"""Ctrl-C: a command ends within seconds, says what is kept, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from mrl.config.run_directory import CHECKPOINTS, steps_in

EXIT_INTERRUPTED = 130
"""As a shell reports SIGINT."""
_UNWINDS_S = 3.0
_AGAIN_S = 0.5
"""One Ctrl-C may come twice: from the terminal, and from a parent that forwards it."""


@contextmanager
def on_interrupt(say: Callable[[], str]) -> Iterator[None]:
    """Unwind at the first Ctrl-C, for some seconds; end at once at the second.

    Checkpoints are whole at any moment, and what keeps Ray and the reward workers ends them with this process.
    """
    if signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, None) or threading.current_thread() is not _MAIN:
        yield
        return
    began: list[float] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if began:
            if time.monotonic() - began[0] > _AGAIN_S:
                os._exit(EXIT_INTERRUPTED)
            return
        began.append(time.monotonic())
        os.write(2, f"\n{say()}\n".encode(errors="backslashreplace"))  # a print may be what it has interrupted
        limit = threading.Timer(_UNWINDS_S, os._exit, [EXIT_INTERRUPTED])
        limit.daemon = True
        limit.start()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        if not began:
            signal.signal(signal.SIGINT, before)


_MAIN = threading.main_thread()


def what_is_kept(directory: Path) -> str:
    """Return where the same command goes on that has run in this directory."""
    if not (steps := steps_in(directory / CHECKPOINTS)):
        return f"{directory} has no checkpoint: the same command begins again"
    return f"the newest checkpoint is that of step {steps[-1]}: the same command goes on from step {steps[-1] + 1}"
