"""The comparison of layouts can itself be wrong: differences by hand, verdicts at their goals."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mrl.config.schema import ParallelConfig
from mrl.models.families import read_spec
from mrl.verify.layout import FLOAT32, Tolerance, Verified, fewest_ranks, score_difference, tolerance
from mrl.verify.parity import Difference, HeldParameter, ParityCase, ParityResult, RankResult, make_rows, merge_ranks
from tests.models.tiny_models import make_tiny

WEIGHT = np.arange(6, dtype=np.float32).reshape(3, 2)
ONE = ParityResult(
    scores=np.array([-1.0, -2.0, -3.0]),
    entropies=np.array([1.0, 2.0, 3.0]),
    losses=(4.0, 0.5),
    grad_norms=(2.0, 8.0),
    held=[HeldParameter("w", ((0, 3), (0, 2)), WEIGHT), HeldParameter("b", ((0, 2),), np.array([1, 2], np.float32))],
)


def test_equal_results_do_not_differ_however_they_are_held() -> None:
    parts = [
        HeldParameter("w", ((2, 3), (0, 2)), WEIGHT[2:]),
        HeldParameter("w", ((0, 2), (1, 2)), WEIGHT[:2, 1:]),
        HeldParameter("b", ((1, 2),), np.array([2], np.float32)),
    ]
    assert Difference.between(ONE, ONE) == Difference(0, 0, 0, 0, 0)
    assert Difference.between(ONE, replace(ONE, held=parts)) == Difference(0, 0, 0, 0, 0)
    in_parts = replace(ONE, held=[*parts, HeldParameter("w", ((0, 2), (0, 1)), WEIGHT[:2, :1])])
    assert Difference.between(in_parts, ONE).parameters == 1  # no part holds b's first element


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"scores": np.array([-1.0, -2.5, -3.0])}, Difference(0.5, 0, 0, 0, 0)),
        ({"scores": np.array([-1.0, -2.0])}, Difference(math.inf, 0, 0, 0, 0)),
        ({"entropies": np.array([1.0, 2.0, 2.75])}, Difference(0, 0.25, 0, 0, 0)),
        ({"losses": (4.0, 0.25)}, Difference(0, 0, 0.5, 0, 0)),
        ({"losses": (5.0, 0.5)}, Difference(0, 0, 0.25, 0, 0)),
        ({"grad_norms": (2.0, 9.0)}, Difference(0, 0, 0, 0.125, 0)),
        ({"held": [HeldParameter("w", ((1, 2), (0, 2)), WEIGHT[1:2] + 0.5)]}, Difference(0, 0, 0, 0, 0.5)),
        ({"held": [HeldParameter("b", ((1, 2),), np.array([1.75], np.float32))]}, Difference(0, 0, 0, 0, 0.25)),
    ],
    ids=lambda value: str(value)[:30],
)
def test_each_difference_is_measured_as_it_says(changes: dict[str, object], difference: Difference) -> None:
    assert Difference.between(ONE, replace(ONE, **changes)) == difference  # type: ignore[arg-type]


def test_ranks_are_put_together_by_row() -> None:
    def rank(rows: dict[int, list[float]], losses: tuple[float, float], name: str) -> RankResult:
        scores = {number: np.array(values) for number, values in rows.items()}
        entropies = {number: -values for number, values in scores.items()}
        return RankResult(
            scores, entropies, losses, (7.0, 8.0), [HeldParameter(name, ((0, 1),), np.zeros(1, np.float32))]
        )

    first = rank({10: [3.0], 2: [1.0, 2.0]}, (0.5, 1.0), "a")
    second = rank({1: [0.5], 3: []}, (0.25, 2.0), "b")
    whole = merge_ranks([first, second, rank({}, (0.0, 0.0), "c")])
    assert whole.scores.tolist() == [0.5, 1.0, 2.0, 3.0]
    assert whole.entropies.tolist() == [-0.5, -1.0, -2.0, -3.0]
    assert whole.losses == (0.75, 3.0)
    assert whole.grad_norms == (7.0, 8.0)
    assert [held.name for held in whole.held] == ["a", "b", "c"]


def test_rows_of_a_measurement_have_every_odd_length(tmp_path: Path) -> None:
    spec = read_spec(make_tiny("llama", tmp_path / "llama"))
    case = ParityCase("", "lm", ParallelConfig(), 64)
    rows = make_rows(spec, case)
    assert (rows.lengths[:3].tolist(), rows.response_lengths[:2].tolist()) == ([2, 12, 24], [1, 0])
    assert rows.lengths.max() <= case.longest
    assert len(rows.lengths) == case.num_rows
    masked = rows.columns["response_mask"]
    assert 0 < int((~masked).sum()) < len(masked)
    assert torch.equal(rows.tokens, make_rows(spec, case).tokens)
    assert not torch.equal(rows.tokens[:40], make_rows(spec, replace(case, seed=1)).tokens[:40])


LIMITS = Tolerance(scores=0.1, loss=0.2, grad_norm=0.3)
RIGHT = Verified(4, transformers=0.1, loss=0.2, grad_norm=0.3, parameters=1.0, tolerance=LIMITS)


@pytest.mark.parametrize(
    ("verified", "is_right"),
    [
        (RIGHT, True),
        (replace(RIGHT, transformers=0.11), False),
        (replace(RIGHT, loss=0.21), False),
        (replace(RIGHT, grad_norm=0.31), False),
        (replace(RIGHT, grad_norm=math.nan), False),
    ],
)
def test_a_layout_is_right_up_to_its_tolerance(verified: Verified, is_right: bool) -> None:
    assert verified.is_right is is_right


def test_the_tolerance_of_a_format(tmp_path: Path) -> None:
    dense, routed = (read_spec(make_tiny(family, tmp_path / family)) for family in ("llama", "mixtral"))
    oracle = np.array([-1.0, 1.0] * 5) * 0.5
    assert tolerance("float32", "lm", dense, oracle) == FLOAT32
    rounding = 2 / 256  # of four layers
    assert tolerance("bfloat16", "lm", dense, oracle) == Tolerance(3 * rounding, 0.05 * rounding, 2 * rounding)
    assert tolerance("bfloat16", "lm", routed, oracle) == Tolerance(3 * rounding, 0.05 * rounding, 10 * rounding)
    assert tolerance("bfloat16", "score", dense, oracle) == Tolerance(3 * rounding, 10 * rounding, 10 * rounding)


@pytest.mark.parametrize(
    ("dtype", "family", "difference"),
    [("float32", "llama", 0.9), ("float32", "mixtral", 0.9), ("bfloat16", "llama", 0.3), ("bfloat16", "mixtral", 0.1)],
)
def test_how_far_scores_are(dtype: str, family: str, difference: float, tmp_path: Path) -> None:
    found = np.array([0.1, -0.1, 0.1, -0.1, 0.9, 0.1, 0.1, -0.1, 0.1, 0.1])
    spec = read_spec(make_tiny(family, tmp_path / family))
    assert score_difference(dtype, spec, found, np.zeros(10)) == pytest.approx(difference)


@pytest.mark.parametrize(
    ("parallel", "dp", "num_ranks"),
    [
        (ParallelConfig(), 1, 1),
        (ParallelConfig(), 8, 2),
        (ParallelConfig(cp=2, pp=2), 1, 4),
        (ParallelConfig(cp=2, pp=2), 2, 8),
        (ParallelConfig(ep=4), 8, 4),
        (ParallelConfig(tp=2, ep=3, etp=2), 6, 6),
        (ParallelConfig(pp=2, ep=4), 4, 8),
    ],
    ids=str,
)
def test_the_fewest_ranks_that_show_a_layout(parallel: ParallelConfig, dp: int, num_ranks: int) -> None:
    assert fewest_ranks(parallel, dp) == num_ranks
