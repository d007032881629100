"""Confidence intervals of means and of paired differences, and how many more units would decide a comparison.

A unit is drawn independently of the others: a prompt, or a pair of runs with the same seed. Several samples of one
prompt are one unit, so k samples never make a figure look k times as certain. All functions are deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from mrl.observe.figures import HIGH, LOW

CONFIDENCE = 0.95
POWER = 0.8
MOST_NEEDED = 1_000_000
_MIN_DIFFERENT = 6
"""Fewer differences of equal sign are no evidence at 95 %: signs alone agree by chance in 2 of 2^5 cases."""
_ROUNDING = 1e-12
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(256)


@cache
def student_quantile(confidence: float, freedom: int) -> float:
    """Return t such that Student's distribution has this share between -t and t.

    With t = sqrt(freedom) tan(angle), the density is proportional to cos(angle)^(freedom - 1).
    """
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - 0.5 * math.log(math.pi)
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = 0.5 * (low + high)
        cosines = np.cos(angle * 0.5 * (_NODES + 1))
        share = angle * math.exp(log_scale) * float(_WEIGHTS @ cosines ** (freedom - 1))
        low, high = (angle, high) if share < confidence else (low, angle)
    return math.sqrt(freedom) * math.tan(low)


def mean_interval(values: Iterable[float]) -> tuple[float, float] | None:
    """Return the 95 % confidence interval of a mean over units, or None if there are fewer than two.

    For values from 0 to 1, this is Wilson's interval with the number of independent answers that explains the variance
    between units: it stays wide if all units are equal, where Student's interval and the bootstrap have the width 0.
    For other values, this is Student's interval.
    """
    x = np.fromiter(values, dtype=np.float64)
    num = len(x)
    if num < 2 or not bool(np.isfinite(x).all()):
        return None
    mean, variance = float(x.mean()), float(x.var(ddof=1))
    t = student_quantile(CONFIDENCE, num - 1)
    if x.min() < -_ROUNDING or x.max() > 1 + _ROUNDING:
        half = t * math.sqrt(variance / num)
        return mean - half, mean + half
    spread = max(0.0, mean * (1 - mean))
    effective = spread * num / variance if min(variance, spread) > _ROUNDING else float(num)
    center = (mean + t**2 / (2 * effective)) / (1 + t**2 / effective)
    half = t / (1 + t**2 / effective) * math.sqrt(spread / effective + t**2 / (4 * effective**2))
    return max(0.0, center - half), min(1.0, center + half)


def with_intervals(prefix: str, values: Mapping[str, Mapping[Any, float]]) -> dict[str, float]:
    """Return the mean of each figure over its units, and its interval as `NAME/low` and `NAME/high`."""
    figures: dict[str, float] = {}
    for name, by_unit in values.items():
        figures[f"{prefix}/{name}"] = float(np.mean(list(by_unit.values())))
        if (interval := mean_interval(by_unit.values())) is not None:
            figures |= dict(zip((f"{prefix}/{name}/{LOW}", f"{prefix}/{name}/{HIGH}"), interval, strict=True))
    return figures


def ratio_values(sums: npt.NDArray[np.float64], sizes: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return values of the units whose mean is sum(sums) / sum(sizes), and whose spread is that of this ratio.

    By the delta method: ratio + (sum_i - ratio size_i) / mean size.
    """
    ratio = sums.sum() / sizes.sum()
    values: npt.NDArray[np.float64] = ratio + (sums - ratio * sizes) / sizes.mean()
    return values


@dataclass(frozen=True)
class PairedDifference:
    """The mean of differences of the same units, with its 95 % confidence interval."""

    mean: float
    half_width: float
    """Infinite if there are fewer than two units."""
    num: int
    num_different: int
    needed: int | None
    """Number of units, in total, that would probably show a difference of this size. None if the difference is 0."""

    @classmethod
    def of(cls, differences: Sequence[float] | npt.NDArray[np.float64], t: float | None = None) -> PairedDifference:
        """Return the difference of these units. `t` replaces the critical value of a single look at the data."""
        d = np.asarray(differences, dtype=np.float64)
        num = len(d)
        mean = float(d.mean()) if num else 0.0
        if num < 2:
            return cls(mean, math.inf, num, int(np.count_nonzero(d)), None)
        deviation = float(d.std(ddof=1))
        half = (t or student_quantile(CONFIDENCE, num - 1)) * deviation / math.sqrt(num)
        return cls(mean, half, num, int(np.count_nonzero(d)), needed_units(mean, deviation))

    @classmethod
    def between(cls, before: Mapping[str, float], after: Mapping[str, float]) -> PairedDifference:
        """Return `after` minus `before` over the units of both."""
        return cls.of([after[unit] - before[unit] for unit in after if unit in before])

    @property
    def is_beyond_noise(self) -> bool:
        """Whether 0 is outside of the interval, and enough units differ for an interval to mean anything."""
        return abs(self.mean) > self.half_width and self.num_different >= _MIN_DIFFERENT

    def more(self, unit: str) -> str:
        """Return how many more units would decide, in words, or nothing if that is unknown."""
        if self.needed is None:
            return ""
        if self.needed >= MOST_NEEDED:
            return f"; more than {MOST_NEEDED:,} {unit}s would be needed to distinguish them"
        # With as many differences per unit as now, enough of them differ.
        needed = max(self.needed, math.ceil(_MIN_DIFFERENT * self.num / max(self.num_different, 1)))
        missing = needed - self.num
        return f"; about {missing:,} more {unit}{'s' * (missing != 1)} would distinguish them" if missing > 0 else ""


def needed_units(mean: float, deviation: float) -> int | None:
    """Return the number of units with which a test at 95 % finds a difference of this mean in 80 % of the cases."""
    if mean == 0 or deviation == 0:
        return None
    normal = NormalDist()
    needed = ((normal.inv_cdf(0.5 + CONFIDENCE / 2) + normal.inv_cdf(POWER)) * deviation / mean) ** 2
    for _ in range(3):  # Student's quantile depends on the number itself
        freedom = max(math.ceil(min(needed, MOST_NEEDED)) - 1, 1)
        t = student_quantile(CONFIDENCE, freedom)
        needed = ((t + normal.inv_cdf(POWER)) * deviation / mean) ** 2
    return max(2, math.ceil(min(needed, MOST_NEEDED)))
