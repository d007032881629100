"""Shared by the parts of `gpu.py`: the device, timings, and rows that are printed and written immediately."""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import re
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Benchmark, Timing, shown
from mrl import files
from mrl.verify.spawn import Device, run_distributed

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
RANKS_ON: Device = "gpu" if ON_GPU else "cpu"
LONGEST_RANK_S = 300.0
WHOLE_PART = "the whole part"
_GRACE_S = 20.0
_MATRIX = 8192 if ON_GPU else 512


def once(action: Callable[[], object]) -> float:
    """Return the seconds of an action, including the device's work."""
    began = time.perf_counter()
    action()
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def timed(action: Callable[[], object], repeats: int) -> Timing:
    """Time an action several times, after one warm-up."""
    return Timing(tuple(once(action) for _ in range(repeats + 1))[1:])


def matrix_rate() -> float:
    """Return the operations per second of a large product in bfloat16."""
    a = torch.randn(_MATRIX, _MATRIX, device=DEVICE, dtype=torch.bfloat16)
    return 2 * _MATRIX**3 / timed(lambda: a @ a, 5).median_s


def taken_bytes() -> int:
    """Return the bytes that all processes hold on the GPU or, without one, this process's bytes of main memory."""
    if ON_GPU:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class GpuBenchmark(Benchmark):
    """A benchmark on a machine that may disappear: it writes each result immediately, and no error ends it."""

    def __init__(self, file: Path | None, limit_s: float, only: str = "") -> None:
        super().__init__("gpu")
        self.part = ""
        self._only = re.compile(only)
        self._file, self._limit_s, self._ends = file, limit_s, time.monotonic() + limit_s

    @property
    def seconds_left(self) -> float:
        return self._ends - time.monotonic()

    def row(self, **columns: Any) -> None:
        """Add and print the row, and rewrite the file."""
        super().row(part=self.part, **columns)
        print("  ".join(f"{name}={shown(value)}" for name, value in self.rows[-1].items()), flush=True)
        self._write()

    def goal(self, name: str, value: float, *, at_least: float | None = None, at_most: float | None = None) -> None:
        super().goal(name, value, at_least=at_least, at_most=at_most)
        print(self.verdict(self.goals[-1]), flush=True)
        self._write()

    @contextmanager
    def attempt(self, what: str = "") -> Iterator[None]:
        """Report an error of the block as a row and a missed goal, and continue with the rest."""
        try:
            yield
        except Exception as error:
            traceback.print_exc(limit=-6)
            reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]
            self.row(what=what or WHOLE_PART, error=f"{type(error).__name__}: {reason[0]}"[:300])
            self.goal(f"{self.part}{what and ', '}{what}: errors", 1, at_most=0)
        if ON_GPU:
            torch.cuda.empty_cache()

    def has_time(self, seconds: float, what: str) -> bool:
        """Return whether the work was chosen and this much time is left. If time lacks, report the work as skipped."""
        if what != WHOLE_PART and not self._only.search(what):
            return False
        if (left := self.seconds_left) >= seconds:
            return True
        self.row(
            what=what, skipped=f"it takes about {seconds:g} s, and {max(left, 0):.0f} s are left of {self._limit_s:g}"
        )
        return False

    def on_rank(self, function: Callable[..., Any], *arguments: Any, environment: dict[str, str] | None = None) -> Any:
        """Call a function in a new process that has the device to itself, with the remaining time as its limit."""
        before = dict(os.environ)
        os.environ.update(environment or {})
        if ON_GPU:
            torch.cuda.empty_cache()
        try:
            limit_s = max(1.0, min(LONGEST_RANK_S, self.seconds_left))
            return run_distributed(1, function, *arguments, timeout_s=limit_s, device=RANKS_ON)[0]
        finally:
            os.environ.clear()
            os.environ.update(before)

    def watch(self) -> None:
        """End this process soon after the limit and print where it hangs. All results are on disk by then."""
        faulthandler.dump_traceback_later(self._limit_s + _GRACE_S, exit=True)

    def finish(self, arguments: argparse.Namespace) -> int:
        """Print the missed goals and return the exit status. All rows were printed before and are in the file."""
        missed = [goal for goal in self.goals if not goal["met"]]
        print(
            "\n".join(
                [*map(self.verdict, missed), f"{len(self.rows)} rows, {len(missed)} of {len(self.goals)} goals missed"]
            )
        )
        self._write()
        return 1 if missed else 0

    def _write(self) -> None:
        if self._file is not None:
            files.write_text(self._file, json.dumps(self.report(), indent=2) + "\n")
