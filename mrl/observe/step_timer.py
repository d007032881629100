"""Where the seconds of a step go."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mrl.events import EventLog, PhaseBegin, PhaseEnd


class StepTimer:
    """Times phases; a phase inside another is timed as part of both. `lap` gives the step's seconds and starts anew."""

    def __init__(
        self,
        events: EventLog,
        on_phase: Callable[[str], None] | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self._events = events
        self._on_phase = on_phase
        self.progress = progress
        """Called with what is done of how much, within a phase."""
        self._seconds: dict[str, float] = {}
        self._began = time.perf_counter()
        self.step = 0

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self._events.write(PhaseBegin(phase, self.step))
        if self._on_phase is not None:
            self._on_phase(phase)
        began = time.perf_counter()
        yield  # a phase that fails has no end: the log then says where it was
        seconds = time.perf_counter() - began
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds
        self._events.write(PhaseEnd(phase, self.step, seconds))

    def pop_seconds(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call, and of the whole as `step`."""
        now = time.perf_counter()
        seconds = {**self._seconds, "step": now - self._began}
        self._seconds, self._began = {}, now
        return seconds
