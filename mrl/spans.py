"""Spans: what this process did, from when to when. `training.profile` makes a trace of those of all processes.

A process appends them to its own file, two lines per span, so that a span without an end shows what a process was
doing when it died. While nothing is recorded, a span costs one comparison.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from mrl import files
from mrl.errors import MrlError

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_MAX_BYTES = 4 << 30
Around = Callable[[str], AbstractContextManager[Any]]


def clock_of_host() -> tuple[str, int]:
    """Return the name of this host's clock, and its nanoseconds. Processes of one kernel share the clock."""
    return _BOOT.read_text().strip(), time.monotonic_ns()


class SpanRecorder:
    """The recorder of one process. Several threads may use it."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._numbers, self._first = count(1), 1
        self._lock = threading.Lock()
        self._cost_ns = 0
        self.lost = ""
        """Why spans could not be written; empty if all were."""
        self.around: Around = nullcontext
        """Marks each span for another profiler, too."""

    @property
    def is_on(self) -> bool:
        return self._file is not None

    def begin(self, path: Path) -> None:
        """Append the spans that begin from now on to this file."""
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._cost_ns, self.lost, self._first = 0, "", next(self._numbers)

    def end(self) -> int:
        """Stop recording. Return the nanoseconds that recording took."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
            self._file = None
            return self._cost_ns

    @contextmanager
    def __call__(self, name: str, **facts: Any) -> Iterator[dict[str, Any]]:
        """Record the block as a span. The block may add facts, such as bytes, to the yielded dict."""
        if self._file is None:
            yield {}
            return
        number, found = self.open(name, **facts), dict[str, Any]()
        try:
            with self.around(name):
                yield found
        finally:
            self.close(number, **found)

    def open(self, name: str, **facts: Any) -> int:
        """Begin a span. Return its number, which ends it; 0 while nothing is recorded."""
        if self._file is None:
            return 0
        number, began = next(self._numbers), time.monotonic_ns()
        thread = threading.current_thread().name
        self._write({"begin": number, "name": name, "time": began, "thread": thread, "facts": facts})
        return number

    def close(self, number: int, **facts: Any) -> None:
        """End a span."""
        if number > self._first:  # it began in this file
            self._write({"end": number, "time": time.monotonic_ns(), "facts": facts})

    def add(self, process: str, name: str = "", begin_ns: int = 0, end_ns: int = 0) -> None:
        """Record a span of another process, or without a name only that it exists."""
        if self._file is not None:
            self._write({"process": process, "name": name, "time": begin_ns, "until": end_ns})

    def _write(self, line: dict[str, Any]) -> None:
        began = time.monotonic_ns()
        with self._lock:
            if self._file is None:
                return
            try:
                files.append(self._file, json.dumps(line).encode() + b"\n")
            except OSError as error:  # the run does not need its trace
                self.lost = str(error)
                os.close(self._file)
                self._file = None
            self._cost_ns += time.monotonic_ns() - began


SPANS = SpanRecorder()
"""The recorder of this process."""


@dataclass
class Span:
    """A span that was read. Times are nanoseconds."""

    name: str
    begin: int
    end: int | None
    """None if it never ended."""
    thread: str
    facts: dict[str, Any] = field(default_factory=dict)


def read_spans(path: Path) -> dict[str, list[Span]]:
    """Return the spans in a file by process: its own, under an empty name, and those of others that it reports.

    A last line cut off by the death of the process is left out.
    """
    spans: dict[str, list[Span]] = {"": []}
    open_spans: dict[int, Span] = {}
    for number, line in enumerate(files.read_bytes(path, _MAX_BYTES).split(b"\n")[:-1], start=1):
        try:
            read = json.loads(line)
            if "process" in read:
                others = spans.setdefault(read["process"], [])
                others += [Span(read["name"], read["time"], read["until"], "")] if read["name"] else []
            elif "begin" in read:
                span = open_spans[read["begin"]] = Span(read["name"], read["time"], None, read["thread"], read["facts"])
                spans[""].append(span)
            else:
                span = open_spans.pop(read["end"])
                span.end = read["time"]
                span.facts |= read["facts"]
        except (ValueError, KeyError, TypeError) as error:
            raise MrlError(f"not a span of this version of mrl: {error!r}", where=f"{path}:{number}") from error
    return spans
