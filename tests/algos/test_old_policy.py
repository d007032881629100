"""Old log-probs without a forward pass: by the paper's formula in plain Python, and what they cannot be made from."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from mrl.algos.old_policy import approximate_old_log_probs
from mrl.algos.rollout_correction import RolloutPair
from mrl.algos.rows import Rows
from mrl.errors import BatchError

CURRENT = [-1.5, -2.5, -0.1, -3.0, -0.7]
ENGINE = [-1.0, -2.0, -0.4, -3.5, math.nan]
AGES = [0, 1, 2, 5, -(1 << 31)]
"""The last token was not drawn by an engine."""


def pair() -> RolloutPair:
    current_T, engine_T = (
        torch.tensor(values, dtype=torch.float64, requires_grad=True) for values in (CURRENT, ENGINE)
    )
    mask_T = torch.tensor([True] * 4 + [False])
    return RolloutPair(Rows.of(torch.tensor([2, 3])), mask_T, current_T, engine_T)


def test_the_engine_s_log_probs_are_the_old_ones() -> None:
    old_T = approximate_old_log_probs("engine", pair())
    assert old_T.tolist() == [*ENGINE[:4], 0.0]
    assert not old_T.requires_grad


def test_old_tokens_get_more_of_the_current_policy() -> None:
    """All of it for the newest weights, nothing for weights of the step before."""
    old_T = approximate_old_log_probs("interpolated", pair(), torch.tensor(AGES))
    shares = [0.0 if age == 0 else 1 / age for age in AGES[:4]]
    expected = [share * engine + (1 - share) * now for share, engine, now in zip(shares, ENGINE, CURRENT, strict=False)]
    assert old_T.tolist() == pytest.approx([*expected, 0.0], abs=1e-15)
    assert not old_T.requires_grad


def test_tokens_of_unknown_age_are_an_error() -> None:
    with pytest.raises(BatchError, match="`staleness`, which is missing"):
        approximate_old_log_probs("interpolated", pair())
    whole = replace(pair(), mask_T=torch.ones(5, dtype=torch.bool), rollout_log_probs_T=torch.tensor(CURRENT))
    with pytest.raises(BatchError, match="weights that drew 1 of 5 tokens are unknown"):
        approximate_old_log_probs("interpolated", whole, torch.tensor(AGES))
