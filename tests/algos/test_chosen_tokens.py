"""The losses that choose tokens, and their choice, against float64 loops over the whole update."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mrl.algos.aggregate import LossNormalizer
from mrl.algos.chosen_tokens import UpdateTokens, covariances, select_tokens
from mrl.algos.losses import PolicyTokens
from mrl.algos.objectives import actor_objective
from mrl.algos.rows import Rows
from mrl.config.algorithm import LossConfig
from mrl.errors import BatchError
from tests.algos import oracles
from tests.algos.cases import Case, all_cases, make_case, on_ranks, take_rows

SHARES = (0.1, 0.3, 0.5, 1.0)


def config_of(name: str, number: int) -> LossConfig:
    low, high = [(0.0, 1.0), (-1.0, 0.5), (0.05, 5.0)][number % 3]
    return LossConfig(
        policy=name,
        cov_share=SHARES[number % 4],
        cov_low=low,
        cov_high=high,
        cov_kl_coef=0.3,
        m2_threshold=(0.04, 0.3, 5.0, 0.001)[number % 4],
        clip_low=0.1,
        dual_clip=1.01,
    )


def update_of(case: Case) -> UpdateTokens:
    ids_B = torch.arange(case.rows.num_rows) + 3
    columns = (case.mask_T, case.column("old"), case.column("advantages"))
    return UpdateTokens(case.rows, *columns, ids_B, rollout_log_probs_T=case.column("rollout"))


def places(case: Case) -> list[tuple[int, int]]:
    """Return row id and position of each written token."""
    return [(number + 3, t) for number, row in enumerate(case.mask) for t, is_written in enumerate(row) if is_written]


def chosen_of(case: Case, config: LossConfig) -> list[bool]:
    if config.policy == "m2po":
        return oracles.too_far(*(oracles.flat(case.written(name)) for name in ("old", "rollout")), config.m2_threshold)
    old, advantages = (oracles.flat(case.written(name)) for name in ("old", "advantages"))
    return oracles.chosen_by_covariance(
        config.policy, old, advantages, places(case), config.cov_share, (config.cov_low, config.cov_high)
    )


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov", "m2po"])
def test_tokens_are_chosen_from_the_whole_update(name: str) -> None:
    num_some = 0
    for number, case in enumerate(all_cases()):
        config, tokens = config_of(name, number), update_of(case)
        selected_T, expected = select_tokens(tokens, config), chosen_of(case, config)
        assert selected_T[case.mask_T].tolist() == expected
        assert not selected_T[~case.mask_T].any()
        columns = (oracles.flat(case.written(column)) for column in ("old", "advantages"))
        covariance_T, count = covariances(tokens)
        assert covariance_T[case.mask_T].tolist() == pytest.approx(oracles.covariances(*columns), rel=1e-9, abs=1e-12)
        assert count == len(expected)
        num_some += 0 < sum(expected) < count
    assert num_some > len(all_cases()) / 2


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov", "m2po"])
def test_the_loss_its_gradient_and_its_reports(name: str) -> None:
    for number, case in enumerate(all_cases()):
        config = config_of(name, number)
        selected_T, chosen = torch.zeros_like(case.mask_T), chosen_of(case, config)
        selected_T[case.mask_T] = torch.tensor(chosen, dtype=torch.bool)
        log_probs_T = case.column("log_probs").requires_grad_()
        tokens = PolicyTokens(
            case.rows, case.mask_T, log_probs_T, case.column("old"), case.column("advantages"), selected_T
        )
        norm = LossNormalizer.of("token-sum", case.rows, case.mask_T)
        objective = actor_objective(tokens, config, norm)
        (gradient_T,) = torch.autograd.grad(objective.loss, log_probs_T)
        columns = [oracles.flat(case.written(column)) for column in ("log_probs", "old", "advantages")]
        numbers = {"clip_cov": (config.clip_low, config.clip_high), "kl_cov": (config.cov_kl_coef,), "m2po": ()}[name]
        formula = getattr(oracles, name)
        expected = [formula(*token, *numbers) for token in zip(*columns, chosen, strict=True)]
        assert float(objective.loss) == pytest.approx(sum(loss for loss, _ in expected), rel=1e-9, abs=1e-9)
        assert gradient_T[case.mask_T].tolist() == pytest.approx([slope for _, slope in expected], rel=1e-9, abs=1e-12)
        assert not gradient_T[~case.mask_T].any()
        reports = objective.reports
        assert float(reports["m2_masked" if name == "m2po" else "cov_selected"]) == pytest.approx(
            oracles.mean([float(x) for x in chosen])
        )
        still = PolicyTokens(case.rows, case.mask_T, log_probs_T, log_probs_T, case.column("advantages"), selected_T)
        assert float(actor_objective(still, config, norm).reports["pg_clipfrac"]) == 0
        if name == "clip_cov":
            low, high = config.clip_low, config.clip_high
            ppo = [oracles.ppo([lp], [old], [a], low, high, None)[0][2] for lp, old, a in zip(*columns, strict=True)]
            clipped = [float(was and not dropped) for was, dropped in zip(ppo, chosen, strict=True)]
            assert float(reports["pg_clipfrac"]) == pytest.approx(oracles.mean(clipped))


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov", "m2po"])
def test_ranks_change_no_choice(name: str) -> None:
    for number in range(12):
        case, config = make_case(number), config_of(name, number)
        whole_T, rng = select_tokens(update_of(case), config), random.Random(number)
        dealt: list[list[int]] = [[] for _ in range(3)]
        for row in range(case.rows.num_rows):
            rng.choice(dealt).append(row)

        def work(
            rank: int,
            sum_over_ranks: Callable[[Tensor], Tensor],
            case: Case = case,
            dealt: list[list[int]] = dealt,
            config: LossConfig = config,
        ) -> Tensor:
            columns = (case.mask_T, *(case.column(name) for name in ("old", "advantages", "rollout")))
            rows, (mask_T, old_T, advantages_T, rollout_T) = take_rows(case.rows, dealt[rank], *columns)
            ids_B = torch.tensor(dealt[rank], dtype=torch.int64) + 3
            tokens = UpdateTokens(rows, mask_T, old_T, advantages_T, ids_B, sum_over_ranks, rollout_T)
            return select_tokens(tokens, config)

        for chosen, found_T in zip(dealt, on_ranks(work, 3), strict=True):
            _, (expected_T,) = take_rows(case.rows, chosen, whole_T)
            assert torch.equal(found_T, expected_T)


def test_each_token_is_dropped_equally_often() -> None:
    rows = Rows.of([50] * 400)
    old_T = torch.tensor([-1.0, -3.0], dtype=torch.float64).repeat(10_000)
    advantages_T = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(10_000)
    tokens = UpdateTokens(rows, torch.ones(20_000, dtype=torch.bool), old_T, advantages_T, torch.arange(400))
    selected_T = select_tokens(tokens, LossConfig(policy="clip_cov", cov_share=0.25, cov_low=0.5))
    assert int(selected_T.sum()) == 5_000
    for counts in (selected_T.view(400, 50).sum(0), selected_T.view(400, 50).sum(1)):
        share = counts.double() / (20_000 / len(counts))
        noise = (0.25 * 0.75 * len(counts) / 20_000) ** 0.5
        assert (share - 0.25).abs().max() < 5 * noise
        assert share.std() > 0.5 * noise


def test_covariances_that_are_equal_are_penalized_together() -> None:
    old_T = torch.tensor([-1.0, -1.0, -3.0, -3.0, -2.0], dtype=torch.float64)
    advantages_T = torch.tensor([1.0, 1.0, -0.5, -0.5, -1.0], dtype=torch.float64)
    tokens = UpdateTokens(Rows.of([5]), torch.ones(5, dtype=torch.bool), old_T, advantages_T, torch.zeros(1))
    chosen = select_tokens(tokens, LossConfig(policy="kl_cov", cov_share=0.2))
    assert chosen.tolist() == [True, True, False, False, False]


def test_a_loss_by_covariance_without_a_choice_is_refused() -> None:
    with pytest.raises(BatchError, match="selected_T"):
        actor_objective(
            make_case(1).policy_tokens,
            LossConfig(policy="kl_cov"),
            LossNormalizer.of("token-sum", make_case(1).rows, make_case(1).mask_T),
        )
