"""What a run prints: one aligned line per step, and on a terminal a panel beneath them while a step runs."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping
from typing import TextIO

from mrl.observe.panel import Panel, SamplePreview

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
_HEADING_EVERY = 20
_REDRAWN_EVERY_S = 0.1
_NO_WRAP, _WRAP = "\x1b[?7l", "\x1b[?7h"


class Console:
    """Prints to a stream, else to standard output. `quiet` prints nothing but what is said with `say`."""

    def __init__(self, num_steps: int, stream: TextIO | None = None, quiet: bool = False) -> None:
        self._num_steps = num_steps
        self._stream = stream or sys.stdout
        self._quiet = quiet
        self._is_live = self._stream.isatty() and not quiet
        self._num_lines = 0
        self._panel, self._num_drawn, self._drawn_at = Panel(num_steps), 0, 0.0

    def print(self, text: str) -> None:
        """A line of its own."""
        self._clear()
        self._stream.write(text + "\n")
        self._stream.flush()

    def note(self, text: str) -> None:
        """A line of its own that nobody needs who wants quiet."""
        if not self._quiet:
            self.print(text)

    def phase(self, name: str) -> None:
        """The step has come to this phase; only a terminal shows it."""
        self._panel.phase, self._panel.done, self._panel.total = name, 0, 0
        self._draw()

    def progress(self, done: int, total: int) -> None:
        """So much of the phase is done."""
        self._panel.done, self._panel.total = done, total
        if time.monotonic() - self._drawn_at > _REDRAWN_EVERY_S:
            self._draw()

    def step(self, step: int, metrics: Mapping[str, float], sample: SamplePreview | None = None) -> None:
        """The line of a step; one of its samples is shown on a terminal."""
        self._panel.finish(step, metrics, sample)
        if self._quiet:
            return
        if self._num_lines % _HEADING_EVERY == 0:
            self.print(f"{'step':>{2 * _width(self._num_steps) + 1}}" + "".join(f"{c[0]:>{_WIDTH}}" for c in COLUMNS))
        self._num_lines += 1
        cells = [form.format(metrics[name]) if name in metrics else "-" for _, name, form in COLUMNS]
        number = f"{step}/{self._num_steps}"
        self.print(f"{number:>{2 * _width(self._num_steps) + 1}}" + "".join(f"{cell:>{_WIDTH}}" for cell in cells))

    def _draw(self) -> None:
        if not self._is_live:
            return
        self._clear()
        lines = self._panel.lines(shutil.get_terminal_size().columns)
        drawn = "".join(f"{line}\n" for line in lines)
        self._stream.write(f"{_NO_WRAP}{drawn}{_WRAP}")  # a wide letter must not make two lines of one
        self._stream.flush()
        self._num_drawn, self._drawn_at = len(lines), time.monotonic()

    def _clear(self) -> None:
        if self._num_drawn:
            self._stream.write(f"\x1b[{self._num_drawn}F\x1b[J")  # to the first line of the panel; all below goes
            self._num_drawn = 0


def _width(number: int) -> int:
    return len(str(number))
