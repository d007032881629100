"""One test for each mistake that other trainers are known to have shipped in this part of the code."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mrl.algos.advantages import (
    ADVANTAGES,
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
from mrl.algos.kl import KL_ESTIMATORS, KLController, token_kl
from mrl.algos.losses import POLICY_LOSSES, PolicyTokens, ValueTokens, value_loss
from mrl.algos.objectives import ActorColumns, actor_objective, critic_objective
from mrl.algos.rollout_correction import (
    RolloutPair,
    correction_metrics,
    correction_weights,
    mismatch_metrics,
)
from mrl.algos.rows import Rows
from mrl.config.algorithm import AlgorithmConfig, CorrectionConfig, KlConfig, LossConfig
from mrl.errors import BatchError, ConfigError, MrlError, NameUnknown, RewardError
from tests.algos.cases import make_case, take_rows

KL = KlConfig(where="loss", coef=1.0)
GROUP_WISE = ["grpo", "dr_grpo", "rloo", "opo", "gpg", "grpo_passk"]


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def everything(rows: Rows) -> Tensor:
    return torch.ones(rows.num_tokens, dtype=torch.bool)


def group_advantages(
    name: str, scores: list[float], uids: list[str], dtype: torch.dtype = torch.float64
) -> list[float]:
    """One token per row."""
    rows = Rows.of([1] * len(scores))
    outcomes = Outcomes(torch.tensor(scores, dtype=dtype), uids, rows.lengths_B)
    inputs = AdvantageInputs(rows, everything(rows), batch=outcomes)
    result: list[float] = estimate_advantages(inputs, AlgorithmConfig(advantage=name)).advantages_T.tolist()
    return result


# ---- normalisation


def test_losses_are_summed_in_float32_at_least() -> None:
    rows = Rows.of([1000])
    norm = LossNormalizer.of("token-sum", rows, everything(rows))
    loss = norm.aggregate(torch.full((1000,), 1.0078125, dtype=torch.bfloat16), rows, everything(rows))
    assert loss.dtype == torch.float32
    assert loss.item() == 1007.8125


def test_constant_horizon_not_the_batch_width() -> None:
    rows = Rows.of([2, 1])
    norm = LossNormalizer.of("seq-mean-token-sum-norm", rows, everything(rows), horizon_tokens=100)
    assert norm.aggregate(column(1, 1, 1), rows, everything(rows)).item() == pytest.approx(3 / 2 / 100)
    for horizon in (None, 0):
        with pytest.raises(ConfigError, match="horizon_tokens"):
            replace(norm, horizon_tokens=horizon).weights(rows, everything(rows))


@pytest.mark.parametrize("mode", list(AGGREGATIONS))
def test_context_parallel_ranks_share_out_the_weights_of_whole_rows(mode: str) -> None:
    """A row's tokens lie on several ranks: weights are made before the cut, and are 0 under the mask."""
    rows, mask_T = Rows.of([5, 2]), torch.tensor([True, True, False, True, True, False, True])
    norm = LossNormalizer.of(mode, rows, mask_T, horizon_tokens=9)
    losses_T, weights_T = column(1, 2, 3, 4, 5, 6, 7), norm.weights(rows, mask_T)
    assert not weights_T[~mask_T].any()
    ranks = [[0, 1, 5], [2, 3, 4, 6]]
    total = sum((losses_T[rank] * weights_T[rank]).sum().item() for rank in ranks)
    assert total == pytest.approx(norm.aggregate(losses_T, rows, mask_T).item())


def test_fully_masked_rows_are_in_no_denominator() -> None:
    rows, mask_T = Rows.of([2, 2, 0]), torch.tensor([True, True, False, False])
    assert LossNormalizer.of("token-mean", rows, mask_T) == LossNormalizer("token-mean", num_tokens=2, num_rows=1)
    for mode in ("seq-mean-token-sum", "seq-mean-token-mean"):
        loss = LossNormalizer.of(mode, rows, mask_T).aggregate(column(1, 1, math.nan, math.nan), rows, mask_T)
        assert loss.item() == (2 if mode == "seq-mean-token-sum" else 1)


@pytest.mark.parametrize("mode", ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_a_fully_masked_batch_has_loss_zero_and_gradient_zero(mode: str) -> None:
    rows = Rows.of([2, 1])
    mask_T = torch.zeros(3, dtype=torch.bool)
    leaf_T = column(1, 2, math.inf).requires_grad_()
    loss = LossNormalizer.of(mode, rows, mask_T).aggregate(leaf_T, rows, mask_T)
    loss.backward()
    assert loss.item() == 0
    assert leaf_T.grad is not None
    assert not leaf_T.grad.any()


def test_filtered_groups_leave_the_denominator() -> None:
    """Uniform groups teach nothing. Kept, they dilute the loss and their KL still acts; dropped, they do neither."""
    rows = Rows.of([1] * 4)
    outcomes = Outcomes(column(1, 0, 1, 1), ["a", "a", "b", "b"], rows.lengths_B)
    advantages_T = column(*group_advantages("dr_grpo", [1, 0, 1, 1], ["a", "a", "b", "b"]))
    log_probs_T, ref_T = column(-1, -2, -1, -2), column(-1.5, -1, -3, -3)
    losses = []
    for chosen in ([0, 1, 2, 3], filter_groups(outcomes).take(1).tolist()):
        part, (lp_T, ref, a_T) = take_rows(rows, chosen, log_probs_T, ref_T, advantages_T)
        norm = LossNormalizer.of("token-mean", part, everything(part))
        tokens = PolicyTokens(part, everything(part), lp_T, lp_T, a_T)
        reports = actor_objective(tokens, LossConfig(policy="gpg"), norm, ActorColumns(ref), KL).reports
        losses.append((reports["pg_loss"].item(), reports["kl_loss"].item()))
    assert losses[1][0] == pytest.approx(2 * losses[0][0])
    kept_kl = token_kl("k3", log_probs_T, ref_T, everything(rows))[:2].mean().item()
    assert losses[1][1] == pytest.approx(kept_kl)
    assert losses[0][1] != pytest.approx(kept_kl)


@pytest.mark.parametrize(("values", "mask"), [([], []), ([5.0], [True]), ([5.0, 7.0], [True, False])])
def test_whitening_fewer_than_two_tokens_gives_zero(values: list[float], mask: list[bool]) -> None:
    assert not whiten(column(*values), torch.tensor(mask, dtype=torch.bool)).any()


# ---- groups


@pytest.mark.parametrize("name", [*GROUP_WISE, "reinforce_plus_plus_baseline"])
def test_a_batch_of_groups_of_one_is_an_error(name: str) -> None:
    with pytest.raises(BatchError, match=f"{name}.*2 rows.*\n.*at least 2 answers"):
        group_advantages(name, [1.0, 0.0], ["a", "b"])


def test_a_group_that_wrote_nothing_has_finite_advantages() -> None:
    """OPO weighs by tokens; a group of fully masked rows has none."""
    groups = PromptGroups.of(["a", "a", "b", "b"])
    centred_B = groups.centered(column(1, 0, 3, 1), torch.tensor([0, 0, 1, 1]))
    assert torch.isfinite(centred_B).all()
    assert centred_B[2:].tolist() == [1, -1]


@pytest.mark.parametrize("name", GROUP_WISE)
@pytest.mark.parametrize("score", [0.1, 1e4 + 0.1])
def test_a_uniform_group_has_advantage_exactly_zero(name: str, score: float) -> None:
    """A mean of equal floats is not that float, and 1e-17 over a floor of 1e-6 is not 0."""
    assert group_advantages(name, [score] * 3 + [1.0, 0.0], ["u"] * 3 + ["v"] * 2)[:3] == [0, 0, 0]


def test_a_negative_score_has_no_place_in_maxrl() -> None:
    with pytest.raises(RewardError, match=r"1 of 3 scores are negative.*-0.5 \(uid b\)"):
        group_advantages("maxrl", [1.0, 0.0, -0.5], ["b", "b", "b"])
    assert group_advantages("maxrl", [0.0, 0.0, 1.0, 0.0, 0.0, 0.0], ["a"] * 2 + ["b"] * 4) == [0, 0, 3, -1, -1, -1]


def test_two_answers_that_are_equally_good_have_no_advantage_at_pass_at_k() -> None:
    assert group_advantages("grpo_passk", [1.0, 1.0, 0.0], ["a"] * 3) == [0, 0, 0]
    assert group_advantages("grpo_passk", [1.0, 0.5, 0.0], ["a"] * 3) == pytest.approx([1, 0, 0], abs=1e-5)


def test_variance_survives_a_large_offset() -> None:
    """E[x^2] - E[x]^2 is negative here."""
    assert group_advantages("grpo", [1e8 + 1, 1e8, 1e8 + 1, 1e8], ["a"] * 4) == pytest.approx(
        [0.8660239, -0.8660239, 0.8660239, -0.8660239], abs=1e-6
    )
    mean, variance = global_moments(column(1e8 + 1, 1e8 - 1), torch.ones(2, dtype=torch.bool))
    assert (mean.item(), variance.item()) == (1e8, 2.0)


def test_small_differences_survive_float32_scores_and_bf16_is_widened() -> None:
    found = group_advantages("grpo", [1.0, 1.00001], ["a", "a"], torch.float32)
    assert found[0] == -found[1]
    assert found[1] > 0.6
    mask_T = torch.ones(3, dtype=torch.bool)
    rewards_T = torch.tensor([1.0, 1.0, 1.0], dtype=torch.bfloat16)
    inputs = AdvantageInputs(Rows.of([3]), mask_T, rewards_T, rewards_T)
    gae = estimate_advantages(inputs, AlgorithmConfig(advantage="gae", gamma=0.999, lam=0.95, whiten=False))
    assert gae.advantages_T.dtype == torch.float32
    assert gae.advantages_T[1].item() == pytest.approx(0.999)  # bf16 would say 1
    rewards_T = apply_kl_penalty(torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([0.001]), mask_T[:1], 1.0)
    assert rewards_T.item() == pytest.approx(0.999)


# ---- rewards


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_reward_is_an_error_that_names_its_row(bad: float) -> None:
    with pytest.raises(RewardError, match=r"1 of 4 rewards.*row 2 \(uid b\)"):
        group_advantages("grpo", [1, 0, bad, 1], ["a", "a", "b", "b"])


def test_of_many_bad_rewards_the_first_rows_are_named() -> None:
    with pytest.raises(RewardError, match=r"2 of 3 rewards.*row 0 \(uid a\).*row 2 \(uid c\)"):
        Outcomes(column(math.nan, 1.0, math.inf), ["a", "b", "c"], torch.ones(3))
    with pytest.raises(RewardError, match="and 3 more"):
        Outcomes(column(*[math.nan] * 8), list("abcdefgh"), torch.ones(8))


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus", "remax"])
def test_bad_token_rewards_are_errors(name: str) -> None:
    rows, mask_T = Rows.of([2, 2]), torch.tensor([True, True, True, False])
    inputs = AdvantageInputs(rows, mask_T, column(0, 0, math.nan, 0), column(0, 0, 0, 0), column(0, 0))
    with pytest.raises(RewardError, match="not finite; first: nan on token 0 of row 1"):
        estimate_advantages(inputs, AlgorithmConfig(advantage=name))
    inputs = AdvantageInputs(rows, mask_T, column(0, 0, 0, 1), column(0, 0, 0, 0), column(0, 0))
    with pytest.raises(RewardError, match=r"did not write; first: 1.0 on token 1 of row 1"):
        estimate_advantages(inputs, AlgorithmConfig(advantage=name))


def test_the_critic_learns_from_the_rewards_after_kl() -> None:
    rows, mask_T = Rows.of([2]), torch.ones(2, dtype=torch.bool)
    scores_T = scores_to_token_rewards(column(1.0), rows, mask_T)
    kl_T = column(0.5, 0.25)
    rewards_T = apply_kl_penalty(scores_T, kl_T, mask_T, 0.1)
    found = estimate_advantages(
        AdvantageInputs(rows, mask_T, rewards_T, column(0, 0)), AlgorithmConfig(advantage="gae")
    )
    assert found.returns_T is not None
    assert found.returns_T.tolist() == pytest.approx([0.925, 0.975])
    assert kl_penalized_scores(column(1.0), kl_T, rows, mask_T, 0.1).item() == pytest.approx(0.925)


def test_kl_in_reward_and_in_loss_at_once() -> None:
    rows, mask_T = Rows.of([1]), torch.ones(1, dtype=torch.bool)
    log_probs_T, ref_T = column(-1.0).requires_grad_(), column(-2.0)
    kl_T = token_kl("k1", log_probs_T, ref_T, mask_T)
    rewards_T = apply_kl_penalty(column(1.0), kl_T, mask_T, 0.1)
    assert not rewards_T.requires_grad
    assert rewards_T.item() == pytest.approx(0.9)
    tokens = PolicyTokens(rows, mask_T, log_probs_T, log_probs_T.detach(), rewards_T)
    norm = LossNormalizer.of("token-mean", rows, mask_T)
    kl = KlConfig(where="both", coef=0.5, in_loss="k2")
    objective = actor_objective(tokens, LossConfig(), norm, ActorColumns(ref_T), kl)
    (gradient_T,) = torch.autograd.grad(objective.loss, log_probs_T)
    assert gradient_T.item() == pytest.approx(-0.9 + 0.5 * 1.0)


def test_overlong_penalty_counts_the_answer_that_just_fits() -> None:
    assert overlong_penalty(torch.tensor([80, 81, 99, 100, 140]), 100, 20).tolist() == pytest.approx(
        [0, -0.05, -0.95, -1, -1]
    )
    for buffer_tokens in (0, 101):
        with pytest.raises(ConfigError, match="buffer"):
            overlong_penalty(torch.tensor([1]), 100, buffer_tokens)
    with pytest.raises(BatchError, match="must be integers"):
        overlong_penalty(torch.tensor([0.5]), 100, 20)


def test_dynamic_sampling_gives_exactly_the_wanted_groups_or_an_error() -> None:
    outcomes = Outcomes(column(1, 1, 0, 1, 0, 0, 0, 1, 3), list("aabbccdde"), torch.ones(9, dtype=torch.int64))
    found = filter_groups(outcomes)
    assert found.kept_uids == ("b", "d")
    assert (found.num_uniform, found.num_single) == (2, 1)
    assert found.take(1).tolist() == [2, 3]
    assert found.take(2).tolist() == [2, 3, 6, 7]
    with pytest.raises(BatchError, match=r"2 groups.*3 are needed.*2 dropped as uniform, 1 with a single row"):
        found.take(3)


# ---- KL


def policy_over_five_tokens() -> tuple[Tensor, Tensor]:
    return column(0.3, -0.2, 1.0, 0.1, -0.7).requires_grad_(), column(0.1, 0.4, 0.2, -0.5, 0.0)


def test_kl_estimators_are_what_they_claim() -> None:
    """All 5 tokens of a tiny policy, weighed by their probability: expectations without sampling."""
    logits, ref_logits = policy_over_five_tokens()
    log_p, log_ref = logits.log_softmax(0), ref_logits.log_softmax(0)
    exact = (log_p.exp() * (log_p - log_ref)).sum()
    assert exact.item() > 0
    (true_gradient,) = torch.autograd.grad(exact, logits, retain_graph=True)
    every = torch.ones(5, dtype=torch.bool)
    expected_gradient = {}
    for name in ("k1", "k2", "k3", "abs", "k1+", "k3+"):
        kl = token_kl(name, log_p, log_ref, every)
        if name.startswith(("k1", "k3")):
            assert (log_p.exp() * kl).sum().item() == pytest.approx(exact.item())
        loss = (log_p.exp().detach() * kl).sum()
        (expected_gradient[name],) = torch.autograd.grad(loss, logits, retain_graph=True)
    for name in ("k2", "k1+", "k3+"):
        assert torch.allclose(expected_gradient[name], true_gradient)
    assert expected_gradient["k1"].abs().max() < 1e-12  # no force at all: k1 in the loss does nothing
    assert not torch.allclose(expected_gradient["k3"], true_gradient, atol=1e-3)


@pytest.mark.parametrize("d", [-100.0, -30.0, 0.0, 30.0, 100.0])
def test_k3_neither_overflows_nor_makes_nan(d: float) -> None:
    for name, gradient in (("k3", 0.0), ("k3+", d)):
        log_prob_T = torch.tensor([d], dtype=torch.float32, requires_grad=True)
        kl_T = token_kl(name, log_prob_T, torch.zeros(1), torch.ones(1, dtype=torch.bool))
        kl_T.sum().backward()
        assert kl_T.item() == (10.0 if d else 0.0)
        assert log_prob_T.grad is not None
        assert log_prob_T.grad.item() == gradient


def test_the_adaptive_coefficient_survives_a_resume() -> None:
    straight, before = (KLController(0.2, 6.0, 1000) for _ in range(2))
    for kl in (9.0, 2.0, 12.0):
        straight.update(kl, 128)
    before.update(9.0, 128)
    resumed = KLController(0.2, 6.0, 1000)
    resumed.load_state_dict(json.loads(json.dumps(before.state_dict())))
    for kl in (2.0, 12.0):
        resumed.update(kl, 128)
    assert resumed.coef == straight.coef != 0.2
    fixed = KLController(0.1)
    fixed.update(100.0, 128)
    fixed.load_state_dict(json.loads(json.dumps(KLController(0.7).state_dict())))
    assert fixed.coef == 0.1
    with pytest.raises(MrlError, match=r"'fixed'.*'adaptive'"):
        resumed.load_state_dict(fixed.state_dict())
    with pytest.raises(MrlError, match=r"'adaptive'.*'fixed'"):
        fixed.load_state_dict(resumed.state_dict())


def test_the_adaptive_coefficient_moves_the_right_way_and_never_to_nan() -> None:
    controller = KLController(1.0, target=1.0, horizon_rows=100)
    controller.update(1.1, 10)
    assert controller.coef == pytest.approx(1.01)
    controller.update(0.0, 10)
    assert controller.coef == pytest.approx(1.01 * 0.98)
    with pytest.raises(MrlError, match="nan"):
        controller.update(math.nan, 10)
    with pytest.raises(ConfigError, match=r"2 problems(.|\n)*target(.|\n)*horizon_rows"):
        KLController(1.0, target=0.0, horizon_rows=-1)


# ---- policy loss, rollout correction, masks


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_only_the_new_policy_is_differentiated(name: str) -> None:
    rows, mask_T = Rows.of([2]), torch.ones(2, dtype=torch.bool)
    old_T, advantages_T, log_probs_T, weights_T, ref_T = (column(-1, -2).requires_grad_() for _ in range(5))
    tokens = PolicyTokens(rows, mask_T, log_probs_T, old_T, advantages_T, mask_T)
    norm = LossNormalizer.of("token-mean", rows, mask_T)
    extra = ActorColumns(ref_T, rollout_weights_T=weights_T)
    actor_objective(tokens, LossConfig(policy=name), norm, extra, KL).loss.backward()
    assert log_probs_T.grad is not None
    assert old_T.grad is None
    assert advantages_T.grad is None
    assert weights_T.grad is None
    assert ref_T.grad is None
    values_T, old_values_T, returns_T = (column(1, 2).requires_grad_() for _ in range(3))
    critic_objective(ValueTokens(mask_T, values_T, old_values_T, returns_T), rows, norm).loss.backward()
    assert values_T.grad is not None
    assert old_values_T.grad is None
    assert returns_T.grad is None


def test_rollout_weights_are_constants() -> None:
    log_probs_T = column(-1, -2).requires_grad_()
    pair = RolloutPair(Rows.of([2]), torch.ones(2, dtype=torch.bool), log_probs_T, column(-1.1, -2))
    assert not correction_weights(pair, CorrectionConfig()).requires_grad


@pytest.mark.parametrize("filler", [0.0, -100.0, math.nan, math.inf])
def test_fillers_under_the_mask_change_no_ratio(filler: float) -> None:
    rows, mask_T = Rows.of([3]), torch.tensor([True, False, True])
    for level in ("token", "sequence", "geometric"):
        pair = RolloutPair(rows, mask_T, column(-1, filler, -2), column(-1.5, -filler, -2))
        weights_T = correction_weights(pair, CorrectionConfig(level=level, upper=10.0))
        x = {"token": 0.5, "sequence": 0.5, "geometric": 0.25}[level]
        assert weights_T[0].item() == pytest.approx(math.exp(x))
        assert weights_T[1].item() == 0
        assert correction_metrics(pair, CorrectionConfig(level=level))["rollout_is_eff_sample_size"] <= 1
    assert mismatch_metrics(pair)["kl"] == pytest.approx(-0.25)


def test_equal_policies_need_no_correction() -> None:
    case = make_case(3)
    pair = RolloutPair(case.rows, case.mask_T, case.column("old"), case.column("old"))
    for level in ("token", "sequence", "geometric"):
        weights_T = correction_weights(pair, CorrectionConfig(level=level, beyond="mask", upper=1.0, lower=1.0))
        assert torch.equal(weights_T, case.mask_T.double())
    found = mismatch_metrics(pair)
    assert {name for name, value in found.items() if value == 0} == set(found) - {
        "training_ppl", "rollout_ppl", "ppl_ratio"
    }  # fmt: skip
    assert found["ppl_ratio"] == 1
    assert found["training_ppl"] == found["rollout_ppl"]


def test_a_token_without_a_rollout_log_prob_is_an_error() -> None:
    with pytest.raises(BatchError, match="1 of 2 tokens"):
        RolloutPair(Rows.of([2]), torch.ones(2, dtype=torch.bool), column(-1, -1), column(-1, math.nan))


def test_inputs_are_not_modified() -> None:
    case = make_case(11)
    case.scores = [abs(score) for score in case.scores]
    columns = {name: case.column(name) for name in case.columns}
    outcomes, mask_T = replace(case.outcomes, rewards=[(2.0, column(*case.scores))]), case.mask_T
    baselines_B = column(*case.baselines)
    of_tokens = columns["rewards"], columns["values"]
    inputs = AdvantageInputs(case.rows, mask_T, *of_tokens, baselines_B, outcomes, score_norms_T=columns["norms"])
    watched = [*columns.values(), outcomes.scores_B, outcomes.num_tokens_B, mask_T, baselines_B]
    watched += [reward_B for _, reward_B in outcomes.rewards]
    before = [x.clone() for x in watched]
    for name in ADVANTAGES:
        estimate_advantages(inputs, AlgorithmConfig(advantage=name))
    norm = LossNormalizer.of("token-mean", case.rows, mask_T)
    tokens = PolicyTokens(case.rows, mask_T, columns["log_probs"], columns["old"], columns["advantages"], mask_T)
    extra = ActorColumns(columns["ref"], columns["entropy"], columns["values"])
    for name in POLICY_LOSSES:
        actor_objective(tokens, LossConfig(policy=name, entropy_coef=1), norm, extra, KL)
    for name in KL_ESTIMATORS:
        token_kl(name, columns["log_probs"], columns["ref"], mask_T)
    value_loss(ValueTokens(mask_T, columns["values"], columns["old_values"], columns["returns"]))
    pair = RolloutPair(case.rows, mask_T, columns["log_probs"], columns["rollout"])
    correction_weights(pair, CorrectionConfig())
    mismatch_metrics(pair)
    apply_kl_penalty(columns["rewards"], columns["values"], mask_T, 0.1)
    scores_to_token_rewards(outcomes.scores_B, case.rows, mask_T)
    filter_groups(outcomes)
    for now, then in zip(watched, before, strict=True):
        assert torch.equal(now.nan_to_num(7), then.nan_to_num(7))


# ---- mistakes of the caller


def test_missing_columns_and_unknown_names_are_typed_errors() -> None:
    rows, mask_T = Rows.of([1]), torch.ones(1, dtype=torch.bool)
    for name, missing in (("gae", "rewards_T"), ("remax", "rewards_T"), ("grpo", "batch")):
        with pytest.raises(BatchError, match=missing):
            estimate_advantages(AdvantageInputs(rows, mask_T), AlgorithmConfig(advantage=name))
    for name, missing in (("gae", "values_T"), ("remax", "baseline_scores_B")):
        with pytest.raises(BatchError, match=missing):
            estimate_advantages(AdvantageInputs(rows, mask_T, column(1)), AlgorithmConfig(advantage=name))
    without_greedy_score = AdvantageInputs(rows, mask_T, column(1), baseline_scores_B=column(math.nan))
    with pytest.raises(RewardError, match="finite"):
        estimate_advantages(without_greedy_score, AlgorithmConfig(advantage="remax"))
    with pytest.raises(NameUnknown, match='did you mean "grpo"'):
        estimate_advantages(AdvantageInputs(rows, mask_T), AlgorithmConfig(advantage="grop"))
    tokens = PolicyTokens(rows, mask_T, column(-1), column(-1), column(1))
    norm = LossNormalizer.of("token-mean", rows, mask_T)
    with pytest.raises(BatchError, match="ref_log_probs_T"):
        actor_objective(tokens, LossConfig(), norm, kl=KL)
    with pytest.raises(BatchError, match="entropy_T"):
        actor_objective(tokens, LossConfig(entropy_coef=0.1), norm)


def test_columns_that_do_not_fit_are_typed_errors() -> None:
    rows = Rows.of([2, 1])
    for wrong in (lambda: rows.sum(column(1, 2)), lambda: rows.expand(column(1, 2, 3)), lambda: Rows.of([1, -1])):
        with pytest.raises(BatchError):
            wrong()
    with pytest.raises(BatchError, match="3 tokens does not match a mask of 2"):
        whiten(column(1, 2, 3), torch.ones(2, dtype=torch.bool))
    with pytest.raises(BatchError, match="2 scores, 1 uids, 2 token counts"):
        Outcomes(column(1, 2), ["a"], torch.tensor([1, 1]))


def test_a_users_own_functions_are_named_by_module_and_attribute() -> None:
    rows, mask_T = Rows.of([1]), torch.ones(1, dtype=torch.bool)
    inputs = AdvantageInputs(rows, mask_T, column(3))
    own = estimate_advantages(inputs, AlgorithmConfig(advantage="mrl.algos.advantages:reinforce_plus_plus"))
    assert own.returns_T is not None
    assert own.returns_T.tolist() == [3]
