"""Ratios by the age of the weights that drew a token: by hand, over shards, and without tokens of an age."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mrl.algos.rollout_correction import RolloutPair, staleness_metrics
from mrl.algos.rows import Rows

RATIOS = [2.0, 0.5, 1.0, 4.0, 9.0]
AGES = [0, 2, 2, 0, -(1 << 31)]
"""The last token was not drawn by an engine."""
EXPECTED = {
    "ratio_mean/age_0": 3.0,
    "ratio_eff_sample_size/age_0": 36 / (2 * 20),
    "ratio_mean/age_2": 0.75,
    "ratio_eff_sample_size/age_2": 2.25 / (2 * 1.25),
}


def pair_of(ratios: list[float]) -> RolloutPair:
    trained_T = torch.zeros(len(ratios), dtype=torch.float64)
    drawn_T = torch.tensor([-math.log(ratio) for ratio in ratios], dtype=torch.float64)
    mask_T = torch.tensor([ratio < 9.0 for ratio in ratios])
    return RolloutPair(Rows.of(torch.tensor([len(ratios)])), mask_T, trained_T, drawn_T)


def test_by_hand() -> None:
    assert staleness_metrics(pair_of(RATIOS), torch.tensor(AGES)) == pytest.approx(EXPECTED)


def test_shards_of_which_one_has_no_old_token_say_the_same() -> None:
    """Simulates the sum and maximum over all ranks: the first run collects the parts, the second gets the results."""
    parts = [(RATIOS[:1], AGES[:1]), (RATIOS[1:], AGES[1:])]
    sums: list[Tensor] = []

    def collect(x: Tensor) -> Tensor:
        sums.append(x)
        return x

    for ratios, ages in parts:
        staleness_metrics(pair_of(ratios), torch.tensor(ages), collect, lambda _: torch.tensor(2))
    total = torch.stack(sums).sum(0)
    for ratios, ages in parts:
        found = staleness_metrics(pair_of(ratios), torch.tensor(ages), lambda _: total, lambda _: torch.tensor(2))
        assert found == pytest.approx(EXPECTED)


def test_ratios_that_no_number_holds_are_bounded() -> None:
    pair = RolloutPair(
        Rows.of(torch.tensor([2])),
        torch.tensor([True, True]),
        torch.tensor([0.0, -1e4]),
        torch.tensor([-1e4, 0.0]),
    )
    found = staleness_metrics(pair, torch.tensor([1, 1]))
    assert found["ratio_mean/age_1"] == pytest.approx(math.exp(20) / 2)
    assert found["ratio_eff_sample_size/age_1"] == pytest.approx(0.5)
