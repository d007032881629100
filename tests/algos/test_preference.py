"""Losses of ranked responses against TRL's own functions, and properties that hold for all numbers."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mrl.algos.aggregate import LossNormalizer
from mrl.algos.preference import (
    PREFERENCE_LOSSES,
    PairLogProbs,
    Pairs,
    RankedTokens,
    RankingTotals,
    _log_of_rest,
    preference_objective,
    reward_objective,
)
from mrl.algos.rows import Rows
from mrl.config.sft import DpoLossConfig, RewardLossConfig

REFERENCE = json.loads(Path(__file__).with_name("preference_reference.json").read_text())
BATCH = REFERENCE["batch"]


def cases(kind: str) -> Any:
    found = [case for case in REFERENCE["cases"] if case["kind"] == kind]
    return pytest.mark.parametrize("case", found, ids=lambda case: case["name"])


def numbers(values: Any, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def interleaved(chosen: list[Any], rejected: list[Any]) -> list[Any]:
    return [each for pair in zip(chosen, rejected, strict=True) for each in pair]


def pairs_of(num: int) -> Pairs:
    return Pairs.of(torch.arange(num).repeat_interleave(2), torch.arange(2).repeat(num))


def close(found: Tensor, expected: Any, dtype: torch.dtype) -> None:
    rtol = 1e-12 if dtype == torch.float64 else 2e-6
    torch.testing.assert_close(found.detach().double(), numbers(expected), rtol=rtol, atol=rtol * 1e-2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@cases("reward")
def test_a_reward_loss_is_that_of_the_field(case: dict[str, Any], dtype: torch.dtype) -> None:
    inputs, outputs = case["inputs"], case["outputs"]
    num = len(inputs["chosen_rewards"])
    score_B = numbers(interleaved(inputs["chosen_rewards"], inputs["rejected_rewards"]), dtype).requires_grad_()
    margins = inputs["margins"] or [0.0] * num
    config = RewardLossConfig(margin=bool(inputs["margins"]), centering=inputs["centering_coefficient"] or 0.0)
    labels_B = numbers(interleaved(margins, [0.0] * num), dtype)
    found = reward_objective(score_B, pairs_of(num), labels_B, config, RankingTotals(num, 2 * num))
    close(found.loss, outputs["loss"], dtype)
    (grad,) = torch.autograd.grad(found.loss, score_B)
    close(grad[::2], outputs["d_loss_d_chosen"], dtype)
    close(grad[1::2], outputs["d_loss_d_rejected"], dtype)
    margin_P = numbers(inputs["chosen_rewards"]) - numbers(inputs["rejected_rewards"])
    assert float(found.reports["accuracy"]) == pytest.approx(
        float((margin_P > 0).double().mean() + (margin_P == 0).double().mean() / 2)
    )
    assert float(found.reports["margin"]) == pytest.approx(float(margin_P.mean()), rel=1e-5, abs=1e-7)
    assert float(found.reports["score"]) == pytest.approx(float(score_B.detach().mean()), rel=1e-5, abs=1e-7)


def tokens_of(reference: bool, dtype: torch.dtype) -> tuple[RankedTokens, LossNormalizer]:
    lists = interleaved(BATCH["chosen_log_probs"], BATCH["rejected_log_probs"])
    refs = interleaved(BATCH["reference_chosen_log_probs"], BATCH["reference_rejected_log_probs"])
    rows = Rows.of([len(each) for each in lists])
    is_best_T = rows.expand(torch.arange(len(lists)) % 2 == 0)
    mask_T = torch.ones(rows.num_tokens, dtype=torch.bool)
    log_probs_T = numbers([*chain(*lists)], dtype).requires_grad_()
    ref_T = numbers([*chain(*refs)], dtype) if reference else None
    tokens = RankedTokens(rows, mask_T, log_probs_T, ref_T, pairs_of(len(lists) // 2), is_best_T)
    return tokens, LossNormalizer.of("token-mean", rows, mask_T & is_best_T)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@cases("tokens")
def test_a_preference_loss_is_that_of_the_field(case: dict[str, Any], dtype: torch.dtype) -> None:
    config, outputs = DpoLossConfig(**case["config"]), case["outputs"]
    tokens, norm = tokens_of(case["reference"], dtype)
    num = BATCH["pairs"]
    found = preference_objective(tokens, config, norm, RankingTotals(num, 2 * num))
    close(found.loss, outputs["loss"], dtype)
    (grad,) = torch.autograd.grad(found.loss, tokens.log_probs_T)
    expected = interleaved(outputs["d_loss_d_chosen_log_probs"], outputs["d_loss_d_rejected_log_probs"])
    close(grad, [*chain(*expected)], dtype)
    if not config.is_of_means():
        for ours, theirs in (
            ("chosen", "rewards_chosen_mean"),
            ("rejected", "rewards_rejected_mean"),
            ("margin", "margin_mean"),
        ):
            assert float(found.reports[f"reward/{ours}"]) == pytest.approx(outputs[theirs], rel=1e-5)


@pytest.mark.parametrize(
    ("loss", "average", "margin"),
    [
        *(("sigmoid", False, -0.5), ("ipo_sum", False, -0.5), ("sigmoid", True, 0.5)),
        *((loss, False, 0.5) for loss in ("ipo_mean", "simpo", "orpo")),
    ],
)
def test_rewards_are_of_means_where_the_loss_is(loss: str, average: bool, margin: float) -> None:
    """Three tokens of -1 are likelier than one of -2 by their mean, and less likely by their sum."""
    config = DpoLossConfig(loss=loss, average=average, beta=0.5)
    rows, is_best_T = Rows.of([3, 1]), torch.tensor([True, True, True, False])
    log_probs_T, mask_T = numbers([-1.0, -1.0, -1.0, -2.0]), torch.ones(4, dtype=torch.bool)
    tokens = RankedTokens(rows, mask_T, log_probs_T, None, pairs_of(1), is_best_T)
    norm = LossNormalizer.of("token-mean", rows, is_best_T)
    found = preference_objective(tokens, config, norm, RankingTotals(1, 2)).reports
    assert float(found["reward/margin"]) == margin
    assert float(found["accuracy"]) == (margin > 0)


@pytest.mark.parametrize("loss", ["sigmoid", "simpo"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_long_response_is_added_up_as_exactly_as_a_short_one(dtype: torch.dtype, loss: str) -> None:
    """bfloat16 adds nothing to a sum 256 times as large, and float32 has steps of 0.002 in one of 8192 log-probs: what
    has moved is therefore found token by token."""
    num, step = 8192, 2.0**-3 if dtype == torch.bfloat16 else 2.0**-20
    rows = Rows.of([num, 1])
    ref_T = torch.full((num + 1,), -3.0 - 2.0**-10 * (dtype == torch.float32), dtype=dtype)
    log_probs_T, mask_T, is_best_T = ref_T + step, torch.ones(num + 1, dtype=torch.bool), torch.arange(num + 1) < num
    with_reference = loss == "sigmoid"
    tokens = RankedTokens(rows, mask_T, log_probs_T, ref_T if with_reference else None, pairs_of(1), is_best_T)
    norm = LossNormalizer.of("token-mean", rows, is_best_T)
    found = preference_objective(tokens, DpoLossConfig(loss=loss, beta=1.0), norm, RankingTotals(1, 2)).reports
    expected = step * num if with_reference else float(log_probs_T[0])  # a sum, or a mean
    assert float(found["reward/chosen"]) == pytest.approx(expected, rel=1e-6 if with_reference else 1e-3)
    assert float(found["log_prob/chosen"]) == pytest.approx(float(log_probs_T[0]), rel=1e-3)


def test_what_is_reported_is_of_its_own_half() -> None:
    tokens, norm = tokens_of(True, torch.float64)
    found = preference_objective(
        tokens, DpoLossConfig(), norm, RankingTotals(BATCH["pairs"], 2 * BATCH["pairs"])
    ).reports
    for half in ("chosen", "rejected"):
        means = [sum(each) / len(each) for each in BATCH[f"{half}_log_probs"]]
        assert float(found[f"log_prob/{half}"]) == pytest.approx(sum(means) / len(means))


@cases("pairs")
def test_a_loss_of_sums_or_means_is_that_of_the_field(case: dict[str, Any]) -> None:
    config, outputs = DpoLossConfig(**case["config"]), case["outputs"]
    better_P, worse_P = (numbers(case["inputs"][name]).requires_grad_() for name in ("chosen", "rejected"))
    ones_P = torch.ones_like(better_P)  # sums of one token: their own means
    loss = PREFERENCE_LOSSES.resolve(config.loss)(PairLogProbs(better_P, worse_P, ones_P, ones_P), config).mean()
    close(loss, outputs["loss"], torch.float64)
    if "d_loss_d_chosen" in outputs:
        grads = torch.autograd.grad(loss, [better_P, worse_P])
        close(grads[0], outputs["d_loss_d_chosen"], torch.float64)
        close(grads[1], outputs["d_loss_d_rejected"], torch.float64)


@pytest.mark.parametrize("loss", ["sigmoid", "conservative", "robust", "hinge", "ipo_sum", "ipo_mean", "simpo", "orpo"])
def test_gradients_are_those_of_finite_differences(loss: str) -> None:
    config = DpoLossConfig(loss=loss, beta=0.7, smoothing=0.1, gamma=0.3, sft_weight=0.4)
    tokens, norm = tokens_of(reference=loss not in ("simpo", "orpo"), dtype=torch.float64)

    def of(log_probs_T: Tensor) -> Tensor:
        moved = RankedTokens(
            tokens.rows, tokens.mask_T, log_probs_T, tokens.ref_log_probs_T, tokens.pairs, tokens.is_best_T
        )
        return preference_objective(moved, config, norm, RankingTotals(4, 8)).loss

    assert torch.autograd.gradcheck(of, [tokens.log_probs_T])


def test_a_ranked_list_has_a_pair_for_each_two_of_different_rank_and_weighs_one() -> None:
    pairs = Pairs.of(torch.tensor([7, 7, 7, 9, 9]), torch.tensor([1, 0, 1, 0, 1]))
    assert list(zip(pairs.better_P.tolist(), pairs.worse_P.tolist(), strict=True)) == [(1, 0), (1, 2), (3, 4)]
    assert pairs.weight_P.tolist() == [0.5, 0.5, 1.0]


def test_however_groups_are_cut_the_loss_and_its_gradient_are_the_same() -> None:
    torch.manual_seed(1)
    group_B, rank_B = torch.tensor([0, 0, 1, 1, 1, 2, 2]), torch.tensor([0, 1, 0, 1, 2, 1, 0])
    label_B, config = torch.randn(7), RewardLossConfig(margin=True, smoothing=0.1, centering=0.2)
    score_B = torch.randn(7, dtype=torch.float64, requires_grad=True)
    totals = RankingTotals.of(group_B)
    assert totals == RankingTotals(3, 7)
    whole = reward_objective(score_B, Pairs.of(group_B, rank_B), label_B, config, totals)
    parts = []
    for cut in (slice(0, 2), slice(2, 5), slice(5, 7)):
        pairs = Pairs.of(group_B[cut], rank_B[cut])
        parts.append(reward_objective(score_B[cut], pairs, label_B[cut], config, totals))
    torch.testing.assert_close(sum(part.loss for part in parts), whole.loss)
    for name, value in whole.reports.items():
        torch.testing.assert_close(sum(part.reports[name] for part in parts), value, msg=name)
    grads = torch.autograd.grad(sum(part.loss for part in parts), score_B)  # type: ignore[arg-type]
    torch.testing.assert_close(grads, torch.autograd.grad(whole.loss, score_B))


def test_regression_is_the_mean_square_of_what_is_missed() -> None:
    score_B, label_B = torch.tensor([1.0, 3.0]), torch.tensor([0.0, 5.0])
    config = RewardLossConfig(loss="regression", centering=0.0)
    none = Pairs.of(torch.tensor([0, 1]), torch.tensor([0, 0]))
    assert float(reward_objective(score_B, none, label_B, config, RankingTotals(2, 2)).loss) == 2.5


def test_the_log_of_the_rest_is_right_at_both_ends() -> None:
    log_prob = torch.tensor([-1e-6, -1e-3, -0.5, -0.8, -30.0], requires_grad=True)
    exact = torch.tensor(
        [*torch.log(-torch.expm1(log_prob.detach().double()[:4])), -torch.exp(torch.tensor(-30.0).double())]
    )
    found = _log_of_rest(log_prob)
    torch.testing.assert_close(found.detach().double(), exact, rtol=1e-6, atol=0)
    found.sum().backward()
    assert log_prob.grad is not None
    assert bool(log_prob.grad.isfinite().all())
