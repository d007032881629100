"""Metrics of each step: timing of its phases, and `metrics.jsonl`, which the report reads."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mrl import files
from mrl.errors import MrlError
from mrl.events import EventLog, PhaseBegin, PhaseEnd
from mrl.spans import SPANS


class StepTimer:
    """Times phases.

    A phase inside another counts for both. `pop_seconds` returns the step's seconds and resets them.
    """

    def __init__(
        self,
        events: EventLog,
        on_phase: Callable[[str], None] | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self._events = events
        self._on_phase = on_phase
        self.progress = progress
        """Called with the finished and the total amount of work within a phase."""
        self._seconds: dict[str, float] = {}
        self._began = time.perf_counter()
        self.step = 0

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self._events.write(PhaseBegin(phase, self.step))
        if self._on_phase is not None:
            self._on_phase(phase)
        began = time.perf_counter()
        with SPANS(phase):
            yield  # a failed phase has no end event, so the log shows where it failed
        seconds = time.perf_counter() - began
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds
        self._events.write(PhaseEnd(phase, self.step, seconds))

    def pop_seconds(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call, and the total as `step`."""
        now = time.perf_counter()
        seconds = {**self._seconds, "step": now - self._began}
        self._seconds, self._began = {}, now
        return seconds


_MAX_BYTES = 4 << 30


class MetricsFile:
    """Appends one line per step. On resume, lines of repeated steps are removed."""

    def __init__(self, path: Path, first_step: int) -> None:
        self._path = path
        kept = [line for line in read_metrics(path) if line["step"] < first_step] if path.exists() else []
        files.write_text(path, "".join(map(_line, kept)), mode=0o600)
        self._waiting = ""

    def write(self, step: int, metrics: Mapping[str, float]) -> str:
        """Append the metrics of a step. Return the error if they cannot be written; the next call writes them, too.

        Non-finite numbers are written as null: JSON has no NaN.
        """
        self._waiting += _line({"step": step, **metrics})
        try:
            with self._path.open("ab", buffering=0) as file:
                files.append(file.fileno(), self._waiting.encode())
        except OSError as error:
            return str(error)
        self._waiting = ""
        return ""


def as_written(step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return a step's metrics as `read_metrics` would return them."""
    return _parsed(_line({"step": step, **metrics}).encode())


def _line(fields: Mapping[str, Any]) -> str:
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in fields.items()
    }
    return json.dumps(finite, allow_nan=False) + "\n"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics file. An incomplete last line, as after a crash, is left out.

    Any other bad line raises an error.
    """
    try:
        lines = files.read_bytes(path, _MAX_BYTES).split(b"\n")
    except OSError as error:
        raise MrlError(f"cannot read the file: {error.strerror}", where=str(path)) from error
    parsed = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            parsed.append(_parsed(line))
        except (ValueError, RecursionError) as error:
            raise MrlError(f"this is not a line of metrics: {error}", where=f"{path}:{number}") from error
    return parsed


def _parsed(line: bytes) -> dict[str, Any]:
    fields = json.loads(line.decode("utf-8"))
    if not isinstance(fields, dict) or not isinstance(fields.get("step"), int):
        raise ValueError("it is not an object with a step")
    for name, value in fields.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ValueError(f"{name!r:.60} is not a number")
    return fields


_OF_THE_CLOCK = ("timing_s/", "perf/", "sync/seconds", "reward/seconds", "agent/environment_s")


def without_clock(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics that do not depend on the speed of the machine."""
    return {name: value for name, value in metrics.items() if not name.startswith(_OF_THE_CLOCK)}
