"""Console output of a run: one aligned line per step and, on a terminal, a live panel below."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TextIO

CURVES = {"score": "critic/score/mean", "kl": "reward/kl", "length": "response_length/mean"}
_BARS = "▁▂▃▄▅▆▇█"
_BAR_WIDTH, _CURVE_WIDTH, _AVERAGED = 24, 20, 10
_MIN_SHARE = 0.01
_SECONDS = "timing_s/"


@dataclass(frozen=True)
class SamplePreview:
    prompt: str
    response: str
    score: float


@dataclass
class Panel:
    num_steps: int
    step: int = 0
    phase: str = ""
    done: int = 0
    total: int = 0
    """Size of the phase, if it is known."""
    sample: SamplePreview | None = None
    curves: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in CURVES})
    seconds: list[Mapping[str, float]] = field(default_factory=list)
    """Seconds of each step, by phase."""

    def finish(self, step: int, metrics: Mapping[str, float], sample: SamplePreview | None) -> None:
        self.step, self.sample = step, sample
        for name, metric in CURVES.items():
            self.curves[name] += [metrics[metric]] if metric in metrics else []
        phase_seconds = {
            name.removeprefix(_SECONDS): value for name, value in metrics.items() if name.startswith(_SECONDS)
        }
        self.seconds += [phase_seconds] if "step" in phase_seconds else []

    def lines(self, width: int) -> list[str]:
        """Return the lines to draw, cut to the width of the terminal."""
        return [line[: max(width - 1, 0)] for line in self._lines()]

    def _lines(self) -> Iterator[str]:
        step = min(self.step + 1, self.num_steps)  # after the last step there is no next step
        yield f"step {step}/{self.num_steps}  {bar(self.step / self.num_steps)}{self._left()}"
        progress = f"  {bar(self.done / self.total)} {self.done}/{self.total}" if self.total else ""
        yield f"  {self.phase:<14}{progress}"
        if self.seconds:
            total, seconds = self.seconds[-1]["step"], self.seconds[-1]
            parts = [name for name in seconds if name != "step" and seconds[name] > _MIN_SHARE * total]
            shown = [f"{name} {seconds[name]:.2f} s ({seconds[name] / total:.0%})" for name in parts]
            yield f"  last step {total:.2f} s: {', '.join(shown)}"
        curves = [
            f"{name} {sparkline(values[-_CURVE_WIDTH:])} {values[-1]:.3g}"
            for name, values in self.curves.items()
            if values
        ]
        if curves:
            yield f"  {'   '.join(curves)}"
        if self.sample is not None:
            sample = f"{printable(self.sample.prompt)} -> {printable(self.sample.response)}"
            yield f"  {sample}  (score {self.sample.score:.2f})"

    def _left(self) -> str:
        recent = [seconds["step"] for seconds in self.seconds[-_AVERAGED:]]
        if not recent:
            return ""
        seconds_left = sum(recent) / len(recent) * (self.num_steps - self.step)
        return f"  left {time.strftime('%H:%M:%S', time.gmtime(seconds_left))}"


def bar(share: float) -> str:
    full = round(min(max(share, 0.0), 1.0) * _BAR_WIDTH)
    return "█" * full + "░" * (_BAR_WIDTH - full)


def sparkline(values: list[float]) -> str:
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in values)


def printable(text: str) -> str:
    """Return text from a model without control characters, which are unsafe on a terminal."""
    return "".join(letter if letter.isprintable() else "·" for letter in text.strip())


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
    """Prints to a stream, by default standard output. With `quiet`, only `print` prints."""

    def __init__(self, num_steps: int, stream: TextIO | None = None, quiet: bool = False) -> None:
        self._num_steps = num_steps
        self._stream = stream or sys.stdout
        self._quiet = quiet
        self._is_live = self._stream.isatty() and not quiet
        self._num_lines = self._num_unprinted = 0
        self._panel, self._num_drawn, self._drawn_at = Panel(num_steps), 0, 0.0

    def print(self, text: str) -> None:
        self._clear()
        self._write(f"{text}\n")

    def note(self, text: str) -> None:
        """Print a line unless the console is quiet."""
        if not self._quiet:
            self.print(text)

    def phase(self, name: str) -> None:
        """Show the current phase of the step, on terminals only."""
        self._panel.phase, self._panel.done, self._panel.total = name, 0, 0
        self._draw()

    def progress(self, done: int, total: int) -> None:
        self._panel.done, self._panel.total = done, total
        if time.monotonic() - self._drawn_at > _REDRAWN_EVERY_S:
            self._draw()

    def step(self, step: int, metrics: Mapping[str, float], sample: SamplePreview | None = None) -> None:
        """Print the line of a step. On a terminal, also show one of its samples."""
        self._panel.finish(step, metrics, sample)
        if self._quiet:
            return
        width = 2 * len(str(self._num_steps)) + 1
        if self._num_lines % _HEADING_EVERY == 0:
            self.print(f"{'step':>{width}}" + "".join(f"{c[0]:>{_WIDTH}}" for c in COLUMNS))
        self._num_lines += 1
        cells = [form.format(metrics[name]) if name in metrics else "-" for _, name, form in COLUMNS]
        self.print(f"{f'{step}/{self._num_steps}':>{width}}" + "".join(f"{cell:>{_WIDTH}}" for cell in cells))

    def _draw(self) -> None:
        if not self._is_live:
            return
        self._clear()
        lines = self._panel.lines(shutil.get_terminal_size().columns)
        drawn = "".join(f"{line}\n" for line in lines)
        self._write(f"{_NO_WRAP}{drawn}{_WRAP}")  # a wide character must not wrap the line
        self._num_drawn, self._drawn_at = len(lines), time.monotonic()

    def _clear(self) -> None:
        if self._num_drawn:
            self._write(
                f"\x1b[{self._num_drawn}F\x1b[J"
            )  # move to the first line of the panel and clear everything below
            self._num_drawn = 0

    def _write(self, text: str) -> None:
        """Print the text. If the disk is full or the pipe closed, count the lost lines: this must not end a run."""
        lost = f"\n({self._num_unprinted} lines could not be printed)\n" if self._num_unprinted else ""
        try:
            self._stream.write(lost + text)
            self._stream.flush()
            self._num_unprinted = 0
        except OSError:
            self._num_unprinted += 1
