"""Every function against its formula in plain float64 loops (`oracles.py`), on the same random batches.

Masked tokens hold NaN in every column, and the oracles never see them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args, get_type_hints

import pytest
import torch

from mrl.algos import advantages as adv
from mrl.algos.advantages import (
    AdvantageInputs,
    apply_kl_penalty,
    estimate_advantages,
    global_moments,
    kl_penalized_scores,
    overlong_penalty,
    scores_to_token_rewards,
    whiten,
)
from mrl.algos.aggregate import AGGREGATIONS, LossNormalizer
from mrl.algos.groups import Outcomes, PromptGroups, filter_groups
from mrl.algos.kl import KL_ESTIMATORS, mean_row_kl, token_kl
from mrl.algos.losses import POLICY_LOSSES, ValueTokens
from mrl.algos.objectives import ActorColumns, actor_objective, critic_objective
from mrl.algos.rollout_correction import (
    RATIO_LEVELS,
    correction_metrics,
    correction_weights,
    kept_tokens,
    mismatch_metrics,
)
from mrl.algos.rows import Rows
from mrl.algos.sampled_pairs import SampledPairs
from mrl.config.algorithm import (
    CHOOSING_LOSSES,
    AlgorithmConfig,
    CorrectionConfig,
    KlConfig,
    LossConfig,
    RejectionConfig,
)
from mrl.errors import BatchError
from tests.algos import oracles
from tests.algos.cases import Case, all_cases

HORIZON = 7
MODES = sorted(AGGREGATIONS)
TRUST_REGIONS = [(0.2, 0.2, 3.0), (0.1, 0.28, None), (0.3, 0.2, 1.5)]


def close(found: torch.Tensor | float, expected: float, tolerance: float = 1e-9) -> bool:
    found = found.item() if isinstance(found, torch.Tensor) else found
    return math.isclose(found, expected, rel_tol=tolerance, abs_tol=tolerance)


def assert_tokens(case: Case, found_T: torch.Tensor, expected: list[oracles.Row], tolerance: float = 1e-9) -> None:
    """Equal on the tokens that the model wrote, 0 on the others."""
    values: Sequence[float] = oracles.flat(expected)
    assert found_T[case.mask_T].tolist() == pytest.approx(values, rel=tolerance, abs=tolerance)
    assert not found_T[~case.mask_T].any()


def norm_of(case: Case, mode: str) -> LossNormalizer:
    return LossNormalizer.of(mode, case.rows, case.mask_T, HORIZON)


def test_all_names_are_tested() -> None:
    assert set(POLICY_LOSSES) - {"vanilla", "geo_mean", *CHOOSING_LOSSES} == set(oracles.POLICY_LOSSES)
    assert set(KL_ESTIMATORS) - {"kl", "mse", "low_var_kl"} == {"k1", "abs", "k2", "k3", "k1+", "abs+", "k3+"}
    assert set(RATIO_LEVELS) == {"token", "sequence", "geometric", "none"}
    assert len(set(adv.ADVANTAGES)) == 15


@pytest.mark.parametrize("mode", MODES)
def test_aggregate(mode: str) -> None:
    for case in all_cases():
        loss = norm_of(case, mode).aggregate(case.column("values"), case.rows, case.mask_T)
        assert close(loss, oracles.aggregate(case.written("values"), mode, HORIZON))


@pytest.mark.parametrize("name", list(oracles.POLICY_LOSSES))
def test_policy_loss_its_gradient_and_its_reports(name: str) -> None:
    for number, case in enumerate(all_cases()):
        (low, high, dual), mode = TRUST_REGIONS[number % 3], MODES[number % len(MODES)]
        tokens, norm = case.policy_tokens, norm_of(case, mode)
        config = LossConfig(policy=name, clip_low=low, clip_high=high, dual_clip=dual)
        objective = actor_objective(tokens, config, norm)
        (gradient_T,) = torch.autograd.grad(objective.loss, tokens.log_probs_T)
        columns = zip(case.written("log_probs"), case.written("old"), case.written("advantages"), strict=True)
        expected = [oracles.POLICY_LOSSES[name](*row, low, high, dual) for row in columns]
        assert close(objective.loss, oracles.aggregate([[t[0] for t in row] for row in expected], mode, HORIZON))
        weights_T = norm.weights(case.rows, case.mask_T)
        slopes = torch.zeros(case.rows.num_tokens, dtype=torch.float64)
        slopes[case.mask_T] = torch.tensor(oracles.flat([[t[1] for t in row] for row in expected]), dtype=torch.float64)
        assert torch.allclose(gradient_T, slopes * weights_T, atol=1e-12)
        tokens_flat = [token for row in expected for token in row]
        reports = objective.reports
        assert close(reports["pg_clipfrac"], oracles.mean([float(t[2]) for t in tokens_flat]))
        if name in ("ppo", "gmpo"):
            assert close(reports["pg_clipfrac_lower"], oracles.mean([float(t[3]) for t in tokens_flat]))


@pytest.mark.parametrize("policy", ["ppo", "gspo", "cispo"])
def test_rows_that_fell_are_masked_where_the_advantage_is_negative(policy: str) -> None:
    num_masked = 0
    for number, case in enumerate(all_cases()):
        tokens, delta = case.policy_tokens, (0.01, 0.2)[number % 2]
        norm = norm_of(case, MODES[number % len(MODES)])
        objective = actor_objective(tokens, LossConfig(policy=policy, opsm_delta=delta), norm)
        (gradient_T,) = torch.autograd.grad(objective.loss, tokens.log_probs_T)
        columns = zip(case.written("log_probs"), case.written("old"), case.written("advantages"), strict=True)
        masked = torch.zeros_like(case.mask_T)
        flat = [is_masked for row in columns for is_masked in oracles.opsm(*row, delta)]
        masked[case.mask_T] = torch.tensor(flat, dtype=torch.bool)
        plain = POLICY_LOSSES.resolve(policy)(tokens, LossConfig(policy=policy)).loss_T
        expected = norm.aggregate(plain * ~masked, case.rows, case.mask_T)
        assert close(objective.loss, float(expected))
        assert not gradient_T[masked].any()
        assert close(objective.reports["opsm_masked"], float(masked.sum()) / max(norm.num_tokens, 1.0))
        num_masked += int(masked.sum())
    assert num_masked


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+", "kl", "mse", "low_var_kl"])
def test_kl_value_and_gradient(name: str) -> None:
    formula = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}.get(name, name)
    for case in all_cases():
        log_probs_T = case.column("log_probs").requires_grad_()
        kl_T = token_kl(name, log_probs_T, case.column("ref"), case.mask_T)
        columns = zip(case.written("log_probs"), case.written("ref"), strict=True)
        expected = [[oracles.kl(formula, a, b) for a, b in zip(*row, strict=True)] for row in columns]
        assert_tokens(case, kl_T.detach(), [[value for value, _ in row] for row in expected])
        (gradient_T,) = torch.autograd.grad(kl_T.sum(), log_probs_T)
        assert_tokens(case, gradient_T, [[slope for _, slope in row] for row in expected])


def test_terms_of_the_actor_objective_add_up() -> None:
    for number, case in enumerate(all_cases()):
        mode = MODES[number % len(MODES)]
        config, kl_config = LossConfig(entropy_coef=0.3), KlConfig(where="loss", coef=0.7, in_loss="k2")
        extra = ActorColumns(case.column("ref"), case.column("entropy"), case.column("values"))
        objective = actor_objective(case.policy_tokens, config, norm_of(case, mode), extra, kl_config)
        names = ("log_probs", "old", "advantages", "ref", "entropy", "values")
        policy, kl = [], []
        for lp, old, a, ref, _, weight in zip(*(case.written(name) for name in names), strict=True):
            losses = oracles.ppo(lp, old, a, 0.2, 0.2, 3.0)
            policy.append([token[0] * w for token, w in zip(losses, weight, strict=True)])
            kl.append([w * (x - y) ** 2 / 2 for x, y, w in zip(lp, ref, weight, strict=True)])
        parts = [oracles.aggregate(rows, mode, HORIZON) for rows in (policy, kl, case.written("entropy"))]
        assert [float(objective.reports[name]) for name in ("pg_loss", "kl_loss", "entropy")] == pytest.approx(parts)
        assert close(objective.loss, parts[0] + 0.7 * parts[1] - 0.3 * parts[2])
        gaps = [b - a for a, b in zip(*(oracles.flat(case.written(c)) for c in ("log_probs", "old")), strict=True)]
        assert close(objective.reports["ppo_kl"], oracles.mean([oracles.clamp(gap, -20, 20) for gap in gaps]))


@pytest.mark.parametrize("clip", [0.2, 0.5, None])
def test_value_loss_its_gradient_and_its_reports(clip: float | None) -> None:
    for number, case in enumerate(all_cases()):
        values_T = case.column("values").requires_grad_()
        tokens = ValueTokens(case.mask_T, values_T, case.column("old_values"), case.column("returns"))
        norm = norm_of(case, MODES[number % len(MODES)])
        objective = critic_objective(tokens, case.rows, norm, clip)
        names = ("values", "old_values", "returns")
        columns = zip(*(case.written(name) for name in names), strict=True)
        expected = [[oracles.value_loss(*token, clip) for token in zip(*row, strict=True)] for row in columns]
        assert close(objective.loss, oracles.aggregate([[t[0] for t in row] for row in expected], norm.mode, HORIZON))
        (gradient_T,) = torch.autograd.grad(objective.loss, values_T)
        slopes = torch.zeros(case.rows.num_tokens, dtype=torch.float64)
        slopes[case.mask_T] = torch.tensor(oracles.flat([[t[1] for t in row] for row in expected]), dtype=torch.float64)
        assert torch.allclose(gradient_T, slopes * norm.weights(case.rows, case.mask_T), atol=1e-12)
        clipped = [float(t[2]) for row in expected for t in row]
        assert close(objective.reports["vf_clipfrac"], oracles.mean(clipped))
        assert close(objective.reports["vpred_mean"], oracles.mean(oracles.flat(case.written("values"))))


def test_gae() -> None:
    for number, case in enumerate(all_cases()):
        gamma, lam = [(1.0, 1.0), (0.9, 0.8), (0.5, 0.0), (0.0, 1.0)][number % 4]
        inputs = AdvantageInputs(case.rows, case.mask_T, case.column("rewards"), case.column("values"))
        expected, returns = oracles.gae(case.written("rewards"), case.written("values"), gamma, lam)
        plain = estimate_advantages(inputs, AlgorithmConfig(advantage="gae", gamma=gamma, lam=lam, whiten=False))
        whitened = estimate_advantages(inputs, AlgorithmConfig(advantage="gae", gamma=gamma, lam=lam))
        assert plain.returns_T is not None
        assert whitened.returns_T is not None
        assert_tokens(case, plain.advantages_T, expected)
        assert_tokens(case, plain.returns_T, returns)
        assert_tokens(case, whitened.advantages_T, oracles.whiten(expected), 1e-7)
        assert_tokens(case, whitened.returns_T, returns)


@pytest.mark.parametrize(("lam_critic", "lam_length"), [(1.0, None), (0.3, 0.3), (None, 0.5), (None, 0.05)])
def test_gae_with_a_lambda_for_the_critic_and_one_by_length(lam_critic: float | None, lam_length: float | None) -> None:
    for case in all_cases():
        inputs = AdvantageInputs(case.rows, case.mask_T, case.column("rewards"), case.column("values"))
        settings = AlgorithmConfig(
            advantage="gae", gamma=0.9, lam=0.7, whiten=False, lam_critic=lam_critic, lam_length=lam_length
        )
        found = estimate_advantages(inputs, settings)
        expected: list[oracles.Row] = []
        for rewards, values in zip(case.written("rewards"), case.written("values"), strict=True):
            lam = 0.7 if lam_length is None else max(0.0, 1 - 1 / (lam_length * max(len(rewards), 1)))
            expected += oracles.gae([rewards], [values], 0.9, lam)[0]
        _, returns = oracles.gae(
            case.written("rewards"), case.written("values"), 0.9, 0.7 if lam_critic is None else lam_critic
        )
        assert found.returns_T is not None
        assert_tokens(case, found.advantages_T, expected)
        assert_tokens(case, found.returns_T, returns)


def test_reinforce_plus_plus() -> None:
    for number, case in enumerate(all_cases()):
        gamma = [1.0, 0.7][number % 2]
        inputs = AdvantageInputs(case.rows, case.mask_T, case.column("rewards"))
        found = estimate_advantages(inputs, AlgorithmConfig(advantage="reinforce_plus_plus", gamma=gamma))
        expected = oracles.returns_to_go(case.written("rewards"), gamma)
        assert found.returns_T is not None
        assert_tokens(case, found.returns_T, expected)
        assert_tokens(case, found.advantages_T, oracles.whiten(expected), 1e-7)


@pytest.mark.parametrize("name", ["remax", "rae"])
def test_score_above_a_baseline(name: Any) -> None:
    for case in all_cases():
        baselines_B = torch.tensor(case.baselines, dtype=torch.float64)
        inputs = AdvantageInputs(case.rows, case.mask_T, case.column("rewards"), baseline_scores_B=baselines_B)
        found = estimate_advantages(inputs, AlgorithmConfig(advantage=name, gamma=0.5))
        returns = oracles.returns_to_go(case.written("rewards"), 1.0)
        expected = [[x - b for x in row] for row, b in zip(returns, case.baselines, strict=True)]
        assert found.returns_T is not None
        assert_tokens(case, found.returns_T, returns)
        assert_tokens(case, found.advantages_T, expected)


def expected_rows(case: Case, name: str, scores: list[float]) -> list[float]:
    return oracles.group_advantage(name, scores, case.uids, [sum(row) for row in case.mask])


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo", "gpg", "grpo_passk", "maxrl"])
def test_group_advantages(name: str) -> None:
    for number, case in enumerate(all_cases()):
        if name == "maxrl":
            case = replace(case, scores=[abs(score) for score in case.scores])
        # Scores that differ by little show the floor under the standard deviation.
        scale, offset = [(1.0, 0.0), (1e-6, 1.0), (1.0, 100.0)][number % 3]
        outcomes = case.outcomes
        scores_B = outcomes.scores_B * scale + offset
        expected = expected_rows(case, name, scores_B.tolist())
        row_advantage = getattr(adv, name)
        found_B = row_advantage(scores_B, PromptGroups.of(case.uids), outcomes)
        written = [i for i, row in enumerate(case.mask) if any(row)]
        tolerance = {"rel": 1e-8, "abs": 1e-12} if scale == 1.0 and offset == 0.0 else {"rel": 1e-5, "abs": 1e-8}
        assert [float(found_B[i]) for i in written] == pytest.approx([expected[i] for i in written], **tolerance)
        inputs = AdvantageInputs(case.rows, case.mask_T, batch=outcomes)
        found = estimate_advantages(inputs, AlgorithmConfig(advantage=name))
        per_row = expected_rows(case, name, case.scores)
        tokens = [[a] * sum(row) for a, row in zip(per_row, case.mask, strict=True)]
        assert_tokens(case, found.advantages_T, tokens, 1e-5)
        assert found.returns_T is None
        assert found.advantages_T.dtype == torch.float32


def test_gdpo_normalizes_each_reward() -> None:
    """Two rewards with other scales and weights; a third that no answer of any prompt differs in adds nothing."""
    for number, case in enumerate(all_cases()):
        chance = torch.Generator().manual_seed(number)
        second = torch.randn(len(case.scores), generator=chance, dtype=torch.float64) * 1e-3
        rewards = [(1.5, torch.tensor(case.scores).double()), (-0.5, second), (4.0, torch.full_like(second, 3.0))]
        inputs = AdvantageInputs(case.rows, case.mask_T, batch=replace(case.outcomes, rewards=rewards))
        found = estimate_advantages(inputs, AlgorithmConfig(advantage="gdpo"))
        of_each = [(weight, expected_rows(case, "grpo", scores.tolist())) for weight, scores in rewards]
        per_row = [math.fsum(weight * values[row] for weight, values in of_each) for row in range(len(case.scores))]
        tokens = [[value] * sum(row) for value, row in zip(per_row, case.mask, strict=True)]
        assert_tokens(case, found.advantages_T, oracles.whiten(tokens), 1e-5)


def test_optimal_token_baseline() -> None:
    for number, case in enumerate(all_cases()):
        config = AlgorithmConfig(advantage="optimal_token_baseline")
        rewards_T, norms_T = case.column("rewards"), case.column("norms")
        inputs = AdvantageInputs(case.rows, case.mask_T, rewards_T, batch=case.outcomes, score_norms_T=norms_T)
        found = estimate_advantages(inputs, config)
        expected = oracles.token_baseline(case.written("rewards"), case.written("norms"), case.uids)
        assert_tokens(case, found.advantages_T, expected, 1e-5)
        if number == 0:
            with pytest.raises(BatchError, match="needs `score_norms_T`"):
                estimate_advantages(replace(inputs, score_norms_T=None), config)


def test_equal_scores_have_no_advantage_over_the_token_baseline() -> None:
    rows, scores_B = Rows.of([3, 1, 2]), torch.full((3,), 0.1, dtype=torch.float64)
    mask_T = torch.ones(6, dtype=torch.bool)
    outcomes = Outcomes(scores_B, ["a", "a", "a"], rows.lengths_B)
    rewards_T = adv.scores_to_token_rewards(scores_B, rows, mask_T)
    norms_T = torch.tensor([0.1, 0.3, 0.7, 0.2, 0.9, 0.4])
    inputs = AdvantageInputs(rows, mask_T, rewards_T, batch=outcomes, score_norms_T=norms_T)
    found = estimate_advantages(inputs, AlgorithmConfig(advantage="optimal_token_baseline"))
    assert found.advantages_T.tolist() == [0.0] * 6


def test_online_dpo_has_the_gradient_of_the_mean_loss_of_its_pairs() -> None:
    """The loss of DPO, a mean over the pairs of a prompt and then over prompts, differentiated by torch."""
    config, loss = AlgorithmConfig(advantage="online_dpo", dpo_beta=0.4), LossConfig(policy="gpg")
    for case in all_cases():
        log_probs_T, ref_T = case.column("log_probs").requires_grad_(), case.column("ref")
        moved_T = torch.where(case.mask_T, log_probs_T - ref_T, 0.0)
        outcomes = replace(case.outcomes, log_ratios_B=case.rows.sum(moved_T).detach())
        found = estimate_advantages(AdvantageInputs(case.rows, case.mask_T, batch=outcomes), config)
        losses, in_pairs = [], set[int]()
        for members in oracles.groups(case.uids).values():
            ends = [end(case.scores[row] for row in members) for end in (max, min)]
            if ends[0] == ends[1]:
                continue
            best, worst = ([row for row in members if case.scores[row] == end] for end in ends)
            gaps = [
                0.4 * (case.rows.sum(moved_T)[high] - case.rows.sum(moved_T)[low]) for high in best for low in worst
            ]
            losses.append(torch.stack([-torch.nn.functional.logsigmoid(gap) for gap in gaps]).mean())
            in_pairs |= {*best, *worst}
        expected_T = torch.zeros_like(log_probs_T)
        if losses:
            whole = torch.stack(losses).mean()
            (expected_T,) = torch.autograd.grad(whole, log_probs_T)
            assert close(found.figures["online_dpo/loss"], float(whole))
        tokens = replace(case.policy_tokens, log_probs_T=log_probs_T, advantages_T=found.advantages_T)
        objective = actor_objective(tokens, replace(loss, aggregation="token-sum"), norm_of(case, "token-sum"))
        (gradient_T,) = torch.autograd.grad(objective.loss, log_probs_T)
        assert torch.allclose(gradient_T, expected_T, rtol=1e-6, atol=1e-9)
        assert not found.advantages_T[~case.mask_T].any()
        assert found.figures["online_dpo/prompts_without_pair"] == len({*case.uids}) - len(losses)
        assert found.figures["online_dpo/samples_without_pair"] == len(case.uids) - len(in_pairs)


def test_online_dpo_pairs_the_best_and_the_worst_answer_and_shows_who_has_no_pair() -> None:
    scores, uids = [1.0, 0.0, 0.5, 1.0, 0.0, 0.0, 2.0], ["a"] * 4 + ["b"] * 2 + ["c"]
    pairs = SampledPairs.of(torch.tensor(scores), PromptGroups.of(uids))
    assert list(zip(pairs.better_P.tolist(), pairs.worse_P.tolist(), strict=True)) == [(0, 1), (3, 1)]
    assert pairs.weight_P.tolist() == [0.5, 0.5]
    figures = pairs.figures(torch.tensor([1.0, -3.0]))
    assert figures["online_dpo/pairs"] == 2
    assert figures["online_dpo/prompts_without_pair"] == 2
    assert figures["online_dpo/samples_without_pair"] == 4, "one between best and worst, three of equal scores"
    assert (figures["online_dpo/accuracy"], figures["online_dpo/margin"]) == (0.5, -1)
    nobody = SampledPairs.of(torch.ones(3), PromptGroups.of(["a"] * 3))
    assert nobody.figures(torch.zeros(0)) == {
        "online_dpo/pairs": 0,
        "online_dpo/prompts_without_pair": 1,
        "online_dpo/samples_without_pair": 3,
    }


def test_reinforce_plus_plus_baseline() -> None:
    for case in all_cases():
        inputs = AdvantageInputs(case.rows, case.mask_T, batch=case.outcomes)
        found = estimate_advantages(inputs, AlgorithmConfig(advantage="reinforce_plus_plus_baseline"))
        per_row = expected_rows(case, "dr_grpo", case.scores)
        expected = oracles.whiten([[a] * sum(row) for a, row in zip(per_row, case.mask, strict=True)])
        assert_tokens(case, found.advantages_T, expected, 2e-5)


def test_whitening_and_moments() -> None:
    for case in all_cases():
        values = oracles.flat(case.written("values"))
        mean, variance = global_moments(case.column("values"), case.mask_T)
        assert close(mean, oracles.mean(values))
        spread = math.fsum((x - oracles.mean(values)) ** 2 for x in values) / max(1, len(values) - 1)
        assert close(variance, spread)
        assert_tokens(case, whiten(case.column("values"), case.mask_T), oracles.whiten(case.written("values")), 1e-7)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("beyond", ["truncate", "mask"])
def test_rollout_correction(level: str, beyond: str) -> None:
    for number, case in enumerate(all_cases()):
        low, high = [(0.0, 2.0), (0.5, 1.5)][number % 2]
        settings = CorrectionConfig(level=level, beyond=beyond, upper=high, lower=low)  # type: ignore[arg-type]
        columns = case.written("log_probs"), case.written("rollout")
        expected = oracles.correction(*columns, level, beyond, low, high)
        assert_tokens(case, correction_weights(case.pair, settings), expected)
        raw = oracles.flat(oracles.correction(*columns, level, "truncate", 0.0, math.inf))
        weights = oracles.flat(expected)
        found = correction_metrics(case.pair, settings)
        assert close(found["rollout_is_mean"], oracles.mean(weights))
        assert close(found["rollout_is_ratio_fraction_high"], oracles.mean([float(r > high) for r in raw]))
        assert close(found["rollout_is_ratio_fraction_low"], oracles.mean([float(r < low) for r in raw]))
        squares = math.fsum(w * w for w in weights)
        size = math.fsum(weights) ** 2 / (len(weights) * squares) if squares else 0.0
        assert close(found["rollout_is_eff_sample_size"], size)


@pytest.mark.parametrize("statistic", get_args(get_type_hints(RejectionConfig)["statistic"]))
def test_rejection(statistic: str) -> None:
    num_rejected = 0
    for number, case in enumerate(all_cases()):
        low, high = (
            [(0.5, 1.5), (0.8, 1.25)][number % 2] if statistic.endswith("k1") else (None, (0.02, 0.3)[number % 2])
        )
        rule = RejectionConfig(statistic=statistic, lower=low if low == 0.5 else None, upper=high)  # type: ignore[arg-type]
        settings = CorrectionConfig(level=("none", "token")[number % 2], reject=[rule])
        rows = list(zip(case.written("log_probs"), case.written("rollout"), strict=True))
        rejected = [oracles.rejects(*row, statistic, low or 0.0, high) for row in rows]
        weights = oracles.correction(*zip(*rows, strict=True), ("none", "token")[number % 2], "truncate", 0.0, 2.0)
        expected = [
            [0.0 if out else w for out, w in zip(*row, strict=True)] for row in zip(rejected, weights, strict=True)
        ]
        assert_tokens(case, correction_weights(case.pair, settings), expected)
        figures, flat = correction_metrics(case.pair, settings), [out for row in rejected for out in row]
        assert close(figures["rollout_rs_masked_fraction"], oracles.mean([float(out) for out in flat]))
        of_rows = [float(any(row)) for row in rejected if row]
        assert close(figures["rollout_rs_seq_masked_fraction"], oracles.mean(of_rows))
        num_rejected += sum(flat)
    assert num_rejected


def test_a_token_must_be_within_all_bounds_of_rejection() -> None:
    rules = [RejectionConfig(statistic="token_k2", upper=0.02), RejectionConfig(statistic="seq_max_k3", upper=0.5)]
    for case in all_cases():
        kept = [kept_tokens(case.pair, CorrectionConfig(level="none", reject=[rule])) for rule in rules]
        both = kept_tokens(case.pair, CorrectionConfig(level="none", reject=rules))
        assert torch.equal(both, kept[0] & kept[1])


def test_mismatch_metrics() -> None:
    for case in all_cases():
        expected = oracles.mismatch(case.written("log_probs"), case.written("rollout"))
        assert mismatch_metrics(case.pair) == pytest.approx(expected, rel=1e-8, abs=1e-9)


def test_mean_row_kl() -> None:
    for case in all_cases():
        expected = oracles.mean([oracles.mean(row) for row in case.written("values") if row])
        assert close(mean_row_kl(case.column("values"), case.rows, case.mask_T), expected)


def test_token_rewards() -> None:
    for case in all_cases():
        scores_B = torch.tensor(case.scores, dtype=torch.float64)
        rows = zip(case.written("old"), case.scores, strict=True)
        placed = [[0.0] * (len(row) - 1) + [s] if row else [] for row, s in rows]
        scores_T = scores_to_token_rewards(scores_B, case.rows, case.mask_T)
        assert_tokens(case, scores_T, placed)
        kl = case.written("values")
        expected = [[s - 0.3 * k for s, k in zip(*row, strict=True)] for row in zip(placed, kl, strict=True)]
        assert_tokens(case, apply_kl_penalty(scores_T, case.column("values"), case.mask_T, 0.3), expected)
        found_B = kl_penalized_scores(scores_B, case.column("values"), case.rows, case.mask_T, 0.3)
        assert found_B.tolist() == pytest.approx([s - 0.3 * math.fsum(k) for s, k in zip(case.scores, kl, strict=True)])


def test_group_filter() -> None:
    for case in all_cases():
        kept = [uid for uid, own in oracles.groups(case.uids).items() if len({case.scores[i] for i in own}) > 1]
        found = filter_groups(case.outcomes)
        assert list(found.kept_uids) == kept
        for num_groups in range(len(kept) + 1):
            rows = [i for i, uid in enumerate(case.uids) if uid in kept[:num_groups]]
            assert found.take(num_groups).tolist() == rows
        sizes = [len(own) for uid, own in oracles.groups(case.uids).items() if uid not in kept]
        assert (found.num_single, found.num_uniform) == (sizes.count(1), len(sizes) - sizes.count(1))


def test_overlong_penalty() -> None:
    lengths = list(range(130))
    expected = []
    for length in lengths:
        if length <= 80:
            expected.append(0.0)
        elif length <= 100:
            expected.append(-0.5 * (length - 80) / 20)
        else:
            expected.append(-0.5)
    assert overlong_penalty(torch.tensor(lengths), 100, 20, 0.5).tolist() == pytest.approx(expected)


def test_own_functions_get_their_options() -> None:
    own = "tests.verify.own_methods"
    for case in all_cases()[:5]:
        norm = norm_of(case, "token-sum")
        once, thrice = (
            actor_objective(case.policy_tokens, LossConfig(policy=f"{own}:scaled", options={"scale": scale}), norm).loss
            for scale in (1.0, 3.0)
        )
        assert close(thrice, 3 * float(once))
        config = AlgorithmConfig(advantage=f"{own}:offset", options={"by": 2.5})
        advantages = estimate_advantages(AdvantageInputs(case.rows, case.mask_T), config)
        assert advantages.advantages_T[case.mask_T].eq(2.5).all()
