"""Comparisons that stop early find nothing where there is nothing, and their intervals hold the truth."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mrl.observe.sequential import critical_values, look


def compare(chance: np.random.Generator, effect: float, planned: int) -> tuple[bool, bool, bool, int]:
    """Return whether a comparison was decided, by the wrong sign, covers its true effect, and its number of pairs."""
    differences: list[float] = []
    while True:
        differences.append(effect + chance.standard_normal())
        difference, is_decided = look(differences, planned)
        if is_decided or len(differences) == planned:
            covers = abs(difference.mean - effect) <= difference.half_width
            return is_decided, is_decided and difference.mean * effect < 0, covers, len(differences)


@pytest.mark.parametrize("planned", [3, 5, 8])
@pytest.mark.parametrize("effect", [0.0, 0.5, 1.0, 2.0, 5.0])
def test_a_thousand_comparisons_cover_their_effect(effect: float, planned: int) -> None:
    chance = np.random.default_rng([planned, int(10 * effect)])
    found = [compare(chance, effect, planned) for _ in range(1000)]
    decided, wrong, covers, pairs = (sum(column) for column in zip(*found, strict=True))
    assert 930 <= covers <= 970, f"{covers} of 1000"
    assert wrong <= 10
    if effect == 0:
        assert decided <= 65, "the error is 5 %"
    if effect == 5:
        assert decided >= 950
        assert pairs < 4000 if planned > 3 else pairs == 3000, "a large effect needs three or four pairs"


def test_the_last_look_is_nearly_that_of_a_fixed_number_of_pairs() -> None:
    assert critical_values(3) == (pytest.approx(4.30, abs=0.06),), "one look is Student's test"
    first, *_, last = critical_values(5)
    assert first == pytest.approx(7.65, abs=0.1), "5 %/3 with two degrees of freedom"
    assert 2.78 < last < 3.5, "2.78 without the looks before"


def test_the_interval_excludes_zero_only_if_it_is_decided() -> None:
    two, is_decided = look([1.0, 1.01], 5)
    assert (two.half_width, is_decided) == (math.inf, False)
    assert look([0.5, 0.5], 5)[0].half_width == math.inf
    three, is_decided = look([1.0, 1.2, 1.4], 5)
    assert is_decided, "t is 10.4"
    assert three.half_width == pytest.approx(0.2 / math.sqrt(3) * 4.849, rel=1e-3), "Student's at 96 %"
    open_, is_decided = look([1.0, 2.0, 3.0], 5)
    assert not is_decided, "t is 3.5; without more looks to come, 4.3 would be needed"
    assert open_.half_width > open_.mean
    equal, is_decided = look([0.0, 0.0, 0.0], 3)
    assert (equal.mean, equal.half_width, is_decided) == (0.0, 0.0, False)
