"""When a run ends before its last step: a signal came, or its time is up."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class ShutdownSignal:
    """Asked between steps."""

    def __init__(self, time_limit_s: float | None) -> None:
        self._time_limit_s = time_limit_s
        self._began = time.monotonic()
        self._signal = ""

    def reason(self) -> str:
        """Return why the run is to stop; empty while it is to go on."""
        limit = self._time_limit_s
        if not self._signal and limit is not None and time.monotonic() - self._began > limit:
            return f"training.time_limit_s={limit:g} is reached"
        return self._signal

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """SIGTERM and SIGUSR1 end the run after the present step."""

        def note(number: int, frame: FrameType | None) -> None:
            self._signal = signal.Signals(number).name

        before = {number: signal.signal(number, note) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
