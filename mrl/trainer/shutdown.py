"""When a run ends before its last step: a signal came, or its time is up."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from mrl.children import listening

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_AGAIN_S = 2.0
"""One SIGTERM may come several times: to the process, to its group, and from each parent that forwards it."""


class ShutdownSignal:
    """Asked between steps."""

    def __init__(self, time_limit_s: float | None) -> None:
        self._time_limit_s = time_limit_s
        self._began = time.monotonic()
        self._signal = ""
        self._terminated: float | None = None

    def reason(self) -> str:
        """Return why the run is to stop; empty while it is to go on."""
        limit = self._time_limit_s
        if not self._signal and limit is not None and time.monotonic() - self._began > limit:
            return f"training.time_limit_s={limit:g} is reached"
        return self._signal

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """SIGTERM, SIGUSR1 and SIGHUP end the run after the present step; a second SIGTERM ends it at once."""
        terminals = [stream for stream in (1, 2) if os.isatty(stream)]

        def note(number: int, frame: FrameType | None) -> None:
            self._signal = signal.Signals(number).name
            if number == signal.SIGTERM:
                self._terminated = self._terminated or time.monotonic()
                if time.monotonic() - self._terminated > _AGAIN_S:
                    os.write(2, b"SIGTERM again: ended without saving\n")
                    os._exit(128 + number)  # what keeps Ray and the reward workers ends them now
            if number == signal.SIGHUP:  # a terminal that is gone fails every print
                for stream in terminals:
                    _close(stream)

        with listening(_SIGNALS, note):
            yield


def _close(stream: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream)
    os.close(nowhere)
