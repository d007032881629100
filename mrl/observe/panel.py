"""What a terminal shows beneath the lines of the steps while a step runs: progress, seconds, curves and a sample.

Pure text: `Console` draws it and takes it away again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

CURVES = {"score": "critic/score/mean", "kl": "reward/kl", "length": "response_length/mean"}
_BARS = "▁▂▃▄▅▆▇█"
_BAR_WIDTH, _CURVE_WIDTH, _AVERAGED = 24, 20, 10
_MIN_SHARE = 0.01
_SECONDS = "timing_s/"


@dataclass(frozen=True)
class SamplePreview:
    """One sample of a step, for people to read."""

    prompt: str
    response: str
    score: float


@dataclass
class Panel:
    """The state of a run as it is drawn."""

    num_steps: int
    step: int = 0
    phase: str = ""
    done: int = 0
    total: int = 0
    """Of the phase, where it says how much there is to do."""
    sample: SamplePreview | None = None
    curves: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in CURVES})
    seconds: list[Mapping[str, float]] = field(default_factory=list)
    """Of each step, by phase."""

    def finish(self, step: int, metrics: Mapping[str, float], sample: SamplePreview | None) -> None:
        """Take in what a step has come to."""
        self.step, self.sample = step, sample
        for name, metric in CURVES.items():
            self.curves[name] += [metrics[metric]] if metric in metrics else []
        of_phase = {name.removeprefix(_SECONDS): value for name, value in metrics.items() if name.startswith(_SECONDS)}
        self.seconds += [of_phase] if "step" in of_phase else []

    def lines(self, width: int) -> list[str]:
        """The lines to draw, none longer than the terminal is wide."""
        return [line[: max(width - 1, 0)] for line in self._lines()]

    def _lines(self) -> Iterator[str]:
        step = min(self.step + 1, self.num_steps)  # a run that saves after its last step is at no further one
        yield f"step {step}/{self.num_steps}  {bar(self.step / self.num_steps)}{self._left()}"
        progress = f"  {bar(self.done / self.total)} {self.done}/{self.total}" if self.total else ""
        yield f"  {self.phase:<14}{progress}"
        if self.seconds:
            whole, spent = self.seconds[-1]["step"], self.seconds[-1]
            parts = [name for name in spent if name != "step" and spent[name] > _MIN_SHARE * whole]
            shown = [f"{name} {spent[name]:.2f} s ({spent[name] / whole:.0%})" for name in parts]
            yield f"  last step {whole:.2f} s: {', '.join(shown)}"
        curves = [f"{name} {sparkline(of[-_CURVE_WIDTH:])} {of[-1]:.3g}" for name, of in self.curves.items() if of]
        if curves:
            yield f"  {'   '.join(curves)}"
        if self.sample is not None:
            yield f"  {_plain(self.sample.prompt)} -> {_plain(self.sample.response)}  (score {self.sample.score:.2f})"

    def _left(self) -> str:
        recent = [seconds["step"] for seconds in self.seconds[-_AVERAGED:]]
        if not recent:
            return ""
        left = sum(recent) / len(recent) * (self.num_steps - self.step)
        return f"  left {time.strftime('%H:%M:%S', time.gmtime(left))}"


def bar(share: float) -> str:
    """How far something is."""
    full = round(min(max(share, 0.0), 1.0) * _BAR_WIDTH)
    return "█" * full + "░" * (_BAR_WIDTH - full)


def sparkline(values: list[float]) -> str:
    """The course of the values in one line of bars."""
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in values)


def _plain(text: str) -> str:
    """Text of a model: on a terminal its control characters could do anything."""
    return "".join(letter if letter.isprintable() else "·" for letter in text.strip())
