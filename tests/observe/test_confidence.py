"""Intervals of shares, scores and ratios cover the true value as often as they claim; what a difference needs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mrl.observe.confidence import PairedDifference, mean_interval, needed_units, ratio_values, student_quantile


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.7062047), (2, 4.3026527), (10, 2.2281389), (30, 2.0422725), (10**5, 1.9599877)]
)
def test_quantiles_are_those_of_the_tables(freedom: int, quantile: float) -> None:
    assert student_quantile(0.95, freedom) == pytest.approx(quantile, abs=1e-6)


@pytest.mark.parametrize("share", [0.03, 0.5, 0.95])
@pytest.mark.parametrize("num_prompts", [20, 100])
def test_intervals_of_shares_cover_the_truth(share: float, num_prompts: int) -> None:
    """Prompts differ in difficulty, and each has four samples, which are not four independent answers."""
    chance, covered = np.random.default_rng(1), 0
    for _ in range(1000):
        difficulty = chance.beta(2 * share, 2 * (1 - share), num_prompts)
        interval = mean_interval(chance.binomial(4, difficulty) / 4)
        assert interval is not None
        covered += interval[0] <= share <= interval[1]
    assert 920 <= covered <= 975


def test_equal_prompts_are_not_certain() -> None:
    low, high = mean_interval([1.0] * 20) or (0.0, 0.0)
    assert (low, high) == (pytest.approx(0.820, abs=1e-3), 1.0)
    assert mean_interval([1.0]) is None
    assert mean_interval([1.0, math.nan]) is None


def test_intervals_of_scores_and_of_ratios_cover_the_truth() -> None:
    chance, covered = np.random.default_rng(2), [0, 0]
    for _ in range(1000):
        scores = chance.normal(-3.0, 2.0, 15)
        sizes = chance.integers(1, 40, 60).astype(np.float64)
        sums = sizes * (0.5 + chance.normal(0, 0.2, 60)) + 3  # longer rows have a lower mean
        truth = 0.5 + 3 / 20
        for number, (values, true) in enumerate(((scores, -3.0), (ratio_values(sums, sizes), truth))):
            low, high = mean_interval(values) or (0.0, 0.0)
            covered[number] += low <= true <= high
        assert float(ratio_values(sums, sizes).mean()) == pytest.approx(sums.sum() / sizes.sum())
    assert all(930 <= number <= 970 for number in covered), covered


def test_a_difference_is_paired_by_prompt() -> None:
    before = {f"p{number}": float(number) for number in range(20)}
    after = {name: value + 0.1 + 0.01 * (-1) ** int(value) for name, value in before.items()}
    paired = PairedDifference.between(before, after | {"new": 5.0})
    assert (paired.num, paired.num_different) == (20, 20)
    assert paired.mean == pytest.approx(0.1)
    assert paired.half_width == pytest.approx(2.0930 * 0.01026 / math.sqrt(20), rel=1e-3), "not the spread of prompts"
    assert paired.is_beyond_noise
    five = PairedDifference.between({str(n): 0.0 for n in range(5)}, {str(n): 1.0 for n in range(5)})
    assert (five.half_width, five.is_beyond_noise) == (0.0, False), "five prompts of five, as one in sixteen by chance"
    assert PairedDifference.of([1.0]).half_width == math.inf


def test_needed_prompts_find_the_difference_in_four_of_five_cases() -> None:
    assert needed_units(0.0, 1.0) is None
    needed, chance = needed_units(0.5, 1.0), np.random.default_rng(3)
    assert needed is not None
    found = sum(PairedDifference.of(chance.normal(0.5, 1.0, needed)).is_beyond_noise for _ in range(1000))
    assert 770 <= found <= 830, f"{found} of 1000 with {needed} prompts"
    assert PairedDifference.of([1e-9, -1e-9, 2e-9, 0.0]).more("prompt").startswith("; about")
    assert "more than 1,000,000 prompts" in PairedDifference.of([1.0, -1.0, 1e-3]).more("prompt")
