"""Time that a worker has used, which on a machine with too few cores is less than the elapsed time.

A worker is late after `limit_s` in which it ran, slept or waited for anything except a core. Seconds in which its main
thread was ready to run but no core was free do not count. They do count if the worker causes the load: it is also late
once it and all its processes have used `limit_s` of CPU time together. No worker gets more than thirty times the limit.
If the kernel does not report waiting times (no /proc/PID/schedstat), every second counts.
"""

from __future__ import annotations

import glob
import os
import time
from collections.abc import Iterator

LOOK_S = 0.05  # between two checks of a worker that may be late
_MAX_STRETCH = 30
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class WorkerClock:
    """Clock of a worker, started when a sample is handed out or the worker is waited for."""

    def __init__(self, pid: int) -> None:
        self._process = f"/proc/{pid}"
        self._begin = time.monotonic()
        self._ran_ns: int | None = None  # at the last check
        _, self._waited_s = _on_cores(self._process)
        self._used_s = _used_s(self._process)

    @property
    def began_ns(self) -> int:
        return int(self._begin * 1e9)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begin

    def look_in_s(self, limit_s: float) -> float:
        """Return the seconds until the worker can be late, or until the next check."""
        left = limit_s - self.seconds
        return left if left > 0 else LOOK_S

    def is_late(self, limit_s: float) -> bool:
        passed = self.seconds
        if passed < limit_s:
            return False
        if passed >= _MAX_STRETCH * limit_s or self._family_used(limit_s):
            return True
        ran_ns, waited_s = _on_cores(self._process)
        # The kernel adds a waiting time only when it is over. A ready thread that has not run since the last check is
        # waiting.
        waits_now = _state(self._process) == "R" and self._ran_ns in (None, ran_ns)
        self._ran_ns = ran_ns
        return not waits_now and passed - (waited_s - self._waited_s) >= limit_s

    def _family_used(self, limit_s: float) -> bool:
        used_s = -self._used_s
        for process in _family(self._process):
            used_s += _used_s(process)
            if used_s >= limit_s:
                return True
        return False


def _on_cores(process: str) -> tuple[int, float]:
    """Return the nanoseconds that the main thread ran, and the seconds that it waited for a core."""
    ran_ns, waited_ns = (_read(f"{process}/schedstat") or "0 0").split()[:2]
    return int(ran_ns), int(waited_ns) / 1e9


def _state(process: str) -> str:
    return (_fields(process) or ["gone"])[0]


def _used_s(process: str) -> float:
    """Return the CPU seconds of all threads, and of children that ended and were reaped."""
    return sum(map(int, _fields(process)[11:15])) / _TICKS_PER_S


def _family(process: str) -> Iterator[str]:
    yield process
    for children in glob.glob(f"{process}/task/*/children"):
        for child in _read(children).split():
            yield from _family(f"/proc/{child}")


def _fields(process: str) -> list[str]:
    """Return the fields of `stat` after the name, which may contain any characters."""
    return _read(f"{process}/stat").rpartition(")")[2].split()


def _read(file: str) -> str:
    """Return the contents of a file in /proc. Four are read for each sample, so this uses the fastest way."""
    try:
        descriptor = os.open(file, os.O_RDONLY)
    except OSError:  # the process has just ended, or the kernel does not have this file
        return ""
    try:
        return os.read(descriptor, 1 << 16).decode(errors="replace")
    except OSError:
        return ""
    finally:
        os.close(descriptor)
