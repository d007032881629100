"""What a run prints: on a terminal a line that lives while a step runs, and one aligned line per step everywhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TextIO

COLUMNS = (  # heading, metric, format
    ("score", "critic/score/mean", "{:.3f}"),
    ("length", "response_length/mean", "{:.1f}"),
    ("kl", "reward/kl", "{:.4f}"),
    ("entropy", "actor/entropy_mean", "{:.3f}"),
    ("grad", "actor/grad_norm", "{:.2f}"),
    ("clipped", "actor/pg_clipfrac", "{:.3f}"),
    ("mismatch", "mismatch/log_prob_abs_diff_mean", "{:.1e}"),
    ("tok/s", "perf/throughput", "{:.0f}"),
    ("s/step", "timing_s/step", "{:.2f}"),
)
_WIDTH = 9
_BARS = "▁▂▃▄▅▆▇█"
_HEADING_EVERY = 20


class Console:
    """Prints to a stream, else to standard output. `quiet` prints nothing but what is said with `say`."""

    def __init__(self, num_steps: int, stream: TextIO | None = None, quiet: bool = False) -> None:
        self._num_steps = num_steps
        self._stream = stream or sys.stdout
        self._quiet = quiet
        self._is_live = self._stream.isatty() and not quiet
        self._num_lines = 0
        self._scores: list[float] = []
        self._step_seconds: list[float] = []
        self._step = 0

    def say(self, text: str) -> None:
        """A line of its own."""
        self._clear()
        self._stream.write(text + "\n")
        self._stream.flush()

    def phase(self, name: str) -> None:
        """The step has come to this phase; only a terminal shows it."""
        if self._is_live:
            bars = sparkline(self._scores[-30:])
            self._clear()
            self._stream.write(f"step {self._step + 1}/{self._num_steps}  {name:<14} score {bars}{self._left()}")
            self._stream.flush()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """The line of a step."""
        self._step = step
        if "critic/score/mean" in metrics:
            self._scores.append(metrics["critic/score/mean"])
        if "timing_s/step" in metrics:
            self._step_seconds.append(metrics["timing_s/step"])
        if self._quiet:
            return
        if self._num_lines % _HEADING_EVERY == 0:
            self.say(f"{'step':>{2 * _width(self._num_steps) + 1}}" + "".join(f"{c[0]:>{_WIDTH}}" for c in COLUMNS))
        self._num_lines += 1
        cells = [form.format(metrics[name]) if name in metrics else "-" for _, name, form in COLUMNS]
        number = f"{step}/{self._num_steps}"
        self.say(f"{number:>{2 * _width(self._num_steps) + 1}}" + "".join(f"{cell:>{_WIDTH}}" for cell in cells))

    def _left(self) -> str:
        recent = self._step_seconds[-10:]
        if not recent:
            return ""
        left = sum(recent) / len(recent) * (self._num_steps - self._step)
        return f"  left {time.strftime('%H:%M:%S', time.gmtime(left))}"

    def _clear(self) -> None:
        if self._is_live:
            self._stream.write("\r\x1b[2K")


def sparkline(values: list[float]) -> str:
    """The course of the values in one line of bars."""
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in values)


def _width(number: int) -> int:
    return len(str(number))
