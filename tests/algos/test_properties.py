"""Properties that hold for every batch."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import chain, cycle, islice
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mrl.algos import advantages as adv
from mrl.algos.advantages import AdvantageInputs, Advantages, estimate_advantages
from mrl.algos.aggregate import AGGREGATIONS, LossNormalizer
from mrl.algos.groups import PromptGroups
from mrl.algos.kl import mean_row_kl
from mrl.algos.losses import PolicyTokens
from mrl.algos.objectives import ActorColumns, Objective, actor_objective
from mrl.algos.rollout_correction import RolloutPair, correction_metrics, mismatch_metrics
from mrl.algos.rows import Rows
from mrl.config.algorithm import AlgorithmConfig, CorrectionConfig, KlConfig, LossConfig
from tests.algos.cases import NUM_CASES, Case, make_case, on_ranks, take_rows

MODES = sorted(AGGREGATIONS)
LOSSES = [
    "ppo",
    "gspo",
    "cispo",
    "gmpo",
    "gpg",
    "sapo",
    "dppo_tv",
    "dppo_kl",
    "topr",
    "clip_cov",
    "kl_cov",
    "dro",
    "vespo",
]
GROUP_WISE = ["grpo", "dr_grpo", "rloo", "opo", "gpg", "grpo_passk"]
TOKEN_WISE = ["gae", "reinforce_plus_plus", "remax"]
ALL = [*GROUP_WISE, *TOKEN_WISE, "reinforce_plus_plus_baseline", "online_dpo", "optimal_token_baseline"]
NUM_EXAMPLES = 8 if NUM_CASES >= 1000 else 2
few = settings(max_examples=NUM_EXAMPLES, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
seeds = st.integers(min_value=0, max_value=10_000)


def split(case: Case, rng: random.Random, parts: int) -> list[list[int]]:
    """The rows dealt out to parts, in any order; parts may be empty."""
    dealt: list[list[int]] = [[] for _ in range(parts)]
    order = list(range(case.rows.num_rows))
    rng.shuffle(order)
    for row in order:
        rng.choice(dealt).append(row)
    return dealt


def actor_part(case: Case, chosen: list[int], norm: LossNormalizer, name: str, leaf_T: Tensor) -> Objective:
    columns = ("old", "advantages", "ref", "entropy", "values")
    rows, (mask_T, log_probs_T, old_T, advantages_T, ref_T, entropy_T, weights_T) = take_rows(
        case.rows, chosen, case.mask_T, leaf_T, *(case.column(column) for column in columns)
    )
    tokens = PolicyTokens(rows, mask_T, log_probs_T, old_T, advantages_T, ref_T < log_probs_T)
    extra = ActorColumns(ref_T, entropy_T, weights_T)
    kl = KlConfig(where="loss", coef=0.5, in_loss="k2")
    return actor_objective(tokens, LossConfig(policy=name, entropy_coef=0.2), norm, extra, kl)


def paired(names: Sequence[str], modes: Sequence[str]) -> list[tuple[str, str]]:
    """Return each name and each mode with two partners; a middle pair with one."""
    num = max(len(names), len(modes))
    pairs = (islice(zip(cycle(names), cycle(turn)), num) for turn in (modes, modes[::-1]))
    return list(dict.fromkeys(chain(*pairs)))


@pytest.mark.parametrize(("name", "mode"), paired(LOSSES, MODES))
@few
@given(seed=seeds, parts=st.integers(2, 6))
def test_splits_change_no_loss_no_gradient_and_no_report(name: str, mode: str, seed: int, parts: int) -> None:
    case = make_case(seed)
    norm = LossNormalizer.of(mode, case.rows, case.mask_T, horizon_tokens=5)
    whole_T = case.column("log_probs").requires_grad_()
    whole = actor_part(case, list(range(case.rows.num_rows)), norm, name, whole_T)
    whole.loss.backward()
    leaf_T = case.column("log_probs").requires_grad_()
    objectives = [actor_part(case, chosen, norm, name, leaf_T) for chosen in split(case, random.Random(seed), parts)]
    for part in objectives:
        part.loss.backward()
    assert sum(part.loss.item() for part in objectives) == pytest.approx(whole.loss.item(), rel=1e-11, abs=1e-12)
    for name_of_report, report in whole.reports.items():
        total = sum(part.reports[name_of_report].item() for part in objectives)
        assert total == pytest.approx(report.item(), rel=1e-11, abs=1e-12)
    assert whole_T.grad is not None
    assert leaf_T.grad is not None
    assert torch.allclose(whole_T.grad, leaf_T.grad, rtol=1e-11, atol=1e-13)


@few
@given(seed=seeds, parts=st.integers(2, 4))
def test_totals_and_metrics_do_not_depend_on_ranks(seed: int, parts: int) -> None:
    case = make_case(seed)
    dealt = split(case, random.Random(seed), parts)
    correction = CorrectionConfig(level="sequence", beyond="mask", upper=1.5, lower=0.5)

    def work(rank: int, sum_over_ranks: Callable[[Tensor], Tensor]) -> tuple[LossNormalizer, float, dict[str, float]]:
        columns = (case.mask_T, case.column("log_probs"), case.column("rollout"), case.column("values"))
        rows, (mask_T, log_probs_T, rollout_T, kl_T) = take_rows(case.rows, dealt[rank], *columns)
        pair = RolloutPair(rows, mask_T, log_probs_T, rollout_T)
        metrics = correction_metrics(pair, correction, sum_over_ranks) | mismatch_metrics(pair, sum_over_ranks)
        metrics.pop("log_prob_abs_diff_max")
        norm = LossNormalizer.of("token-mean", rows, mask_T, sum_over_ranks=sum_over_ranks)
        return norm, mean_row_kl(kl_T, rows, mask_T, sum_over_ranks), metrics

    expected = correction_metrics(case.pair, correction) | mismatch_metrics(case.pair)
    largest = expected.pop("log_prob_abs_diff_max")
    assert mismatch_metrics(case.pair, max_over_ranks=lambda x: x + 1)["log_prob_abs_diff_max"] == largest + 1
    for norm, kl, metrics in on_ranks(work, parts):
        assert norm == LossNormalizer.of("token-mean", case.rows, case.mask_T)
        assert kl == pytest.approx(mean_row_kl(case.column("values"), case.rows, case.mask_T))
        assert metrics == pytest.approx(expected)


def advantages_of(case: Case, name: str, chosen: list[int], rank_sum: Callable[[Tensor], Tensor]) -> Advantages:
    """The shard of the chosen rows, against the outcomes of the whole batch."""
    columns = (case.mask_T, *(case.column(column) for column in ("rewards", "values", "norms")))
    rows, (mask_T, rewards_T, values_T, norms_T) = take_rows(case.rows, chosen, *columns)
    position_B = torch.tensor(chosen, dtype=torch.int64)
    baselines_B = torch.tensor(case.baselines, dtype=torch.float64)[position_B]
    inputs = AdvantageInputs(
        *(rows, mask_T, rewards_T, values_T, baselines_B, case.outcomes, position_B),
        sum_over_ranks=rank_sum,
        score_norms_T=norms_T,
    )
    return estimate_advantages(inputs, AlgorithmConfig(advantage=name, gamma=0.9, lam=0.8))


def alone(x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize("name", ALL)
@few
@given(seed=seeds, parts=st.integers(2, 4))
@example(seed=5, parts=3)
def test_ranks_change_no_advantage(name: str, seed: int, parts: int) -> None:
    case = make_case(seed)
    whole = advantages_of(case, name, list(range(case.rows.num_rows)), alone)
    dealt = split(case, random.Random(seed), parts)
    shards = on_ranks(lambda rank, rank_sum: advantages_of(case, name, dealt[rank], rank_sum), parts)
    for chosen, shard in zip(dealt, shards, strict=True):
        _, (expected_T,) = take_rows(case.rows, chosen, whole.advantages_T)
        assert torch.allclose(shard.advantages_T, expected_T, rtol=1e-6, atol=1e-9)
        if whole.returns_T is not None and shard.returns_T is not None:
            _, (expected_T,) = take_rows(case.rows, chosen, whole.returns_T)
            assert torch.equal(shard.returns_T, expected_T)


@pytest.mark.parametrize("name", ALL)
@few
@given(seed=seeds)
def test_permuting_samples_permutes_advantages(name: str, seed: int) -> None:
    case = make_case(seed)
    order = list(range(case.rows.num_rows))
    random.Random(seed).shuffle(order)
    names = list(case.columns)
    shuffled = Case(
        [case.mask[i] for i in order],
        {column: [case.columns[column][i] for i in order] for column in names},
        [case.scores[i] for i in order],
        [case.uids[i] for i in order],
        [case.baselines[i] for i in order],
    )
    straight = advantages_of(case, name, list(range(len(order))), alone).advantages_T
    _, (expected_T,) = take_rows(case.rows, order, straight)
    found_T = advantages_of(shuffled, name, list(range(len(order))), alone).advantages_T
    assert torch.allclose(found_T, expected_T, rtol=1e-6, atol=1e-9)


def row_advantage(case: Case, name: str, scores_B: Tensor, floor: float = 1e-6) -> Tensor:
    outcomes, groups = case.outcomes, PromptGroups.of(case.uids)
    with patch.object(adv, "STD_FLOOR", floor):
        result: Tensor = getattr(adv, name)(scores_B, groups, outcomes)
    return result


@pytest.mark.parametrize("name", GROUP_WISE)
@few
@given(seed=seeds, shift=st.floats(-1e3, 1e3), scale=st.floats(0.01, 100.0))
def test_laws_of_group_advantages(name: str, seed: int, shift: float, scale: float) -> None:
    case = make_case(seed)
    scores_B = case.outcomes.scores_B
    plain_B = row_advantage(case, name, scores_B, floor=0.0).nan_to_num()
    renamed = Case(case.mask, case.columns, case.scores, [f"group-{uid}" for uid in case.uids], case.baselines)
    assert torch.equal(row_advantage(renamed, name, scores_B, floor=0.0).nan_to_num(), plain_B)
    assert torch.allclose(row_advantage(case, name, scores_B + shift, floor=0.0).nan_to_num(), plain_B, atol=1e-8)
    scaled_B = row_advantage(case, name, scores_B * scale, floor=0.0).nan_to_num()
    assert torch.allclose(scaled_B, plain_B if name in ("grpo", "grpo_passk") else plain_B * scale, atol=1e-8)
    if name in ("grpo", "dr_grpo", "rloo"):
        assert PromptGroups.of(case.uids).sum(plain_B).abs().max() < 1e-9


@few
@given(seed=seeds)
def test_rows_agree_with_plain_lists(seed: int) -> None:
    case = make_case(seed)
    rows, mask_T = case.rows, case.mask_T
    lengths = [len(row) for row in case.mask]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    assert rows.starts_B.tolist() == starts
    assert rows.num_tokens == sum(lengths)
    assert rows.num_rows == len(lengths)
    written = [[start + t for t, kept in enumerate(row) if kept] for start, row in zip(starts, case.mask, strict=True)]
    last = [max(positions, default=-1) for positions in written]
    assert rows.last_token(mask_T).tolist() == last
    assert rows.count(mask_T).tolist() == [sum(row) for row in case.mask]
    position_T = torch.arange(rows.num_tokens, dtype=torch.float64) + 1
    for step in (1, 2, 4):
        expected = [
            start + t + 1 + step if t + step < length else 0.0
            for start, length in zip(starts, lengths, strict=True)
            for t in range(length)
        ]
        assert rows.next_token(position_T, step).tolist() == expected
    assert Rows.of([]).discounted_sum(torch.zeros(0), 0.5).numel() == 0
