"""mrl's result on a case of `algorithms.py` for each function that a peer has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from benchmarks.algorithm_cases import Function, Outputs, Packed
from mrl.algos.advantages import (
    ADVANTAGES,
    AdvantageInputs,
    apply_kl_penalty,
    estimate_advantages,
    overlong_penalty,
    whiten,
)
from mrl.algos.aggregate import AGGREGATIONS
from mrl.algos.chosen_tokens import UpdateTokens, select_tokens
from mrl.algos.groups import PromptGroups
from mrl.algos.kl import KLController, token_kl
from mrl.algos.losses import PolicyTokens, ValueTokens
from mrl.algos.objectives import ActorColumns, actor_objective, critic_objective
from mrl.algos.rollout_correction import (
    RolloutPair,
    correction_metrics,
    correction_weights,
    mismatch_metrics,
)
from mrl.config.algorithm import (
    CHOOSING_LOSSES,
    AlgorithmConfig,
    CorrectionConfig,
    KlConfig,
    LossConfig,
    RejectionConfig,
)

Terms = tuple[dict[str, Any], KlConfig, ActorColumns]
"""Inputs of a term in the actor's loss: keys of the loss section, the KL, and columns."""


def policy(
    name: str,
    mode: str,
    clip: tuple[float, float] | None = None,
    by_row: bool = False,
    dual: bool = True,
    terms: Callable[[Packed], Terms] | None = None,
) -> Function:
    """Return a function for the actor's objective, its gradient and its metrics."""

    def run(case: Packed) -> Outputs:
        settings = case.case
        low, high = clip or (settings["clip_low"], settings["clip_high"])
        terms_of_loss, kl, extra = terms(case) if terms else ({}, KlConfig(), ActorColumns())
        trust: dict[str, Any] = {
            "clip_low": low,
            "clip_high": high,
            "dual_clip": settings["dual_clip"] if dual else None,
        }
        log_probs_T = case.column("log_probs").requires_grad_()
        advantages_T = case.rows.expand(case.per_row("row_advantages")) if by_row else case.column("advantages")
        loss = LossConfig(policy=name, **trust, **terms_of_loss)
        selected_T = selection(case, loss) if name in CHOOSING_LOSSES else None
        tokens = PolicyTokens(case.rows, case.mask_T, log_probs_T, case.column("old"), advantages_T, selected_T)
        objective = actor_objective(tokens, loss, case.norm(mode), extra, kl)
        (gradient_T,) = torch.autograd.grad(objective.loss, log_probs_T)
        return {"loss": objective.loss, "gradient": gradient_T, **objective.reports}

    return run


def selection(case: Packed, config: LossConfig) -> Tensor:
    """Return the tokens that the loss treats differently: by the policy's log-probs, as in verl, not by those from
    before the update."""
    columns = (case.column("log_probs"), case.column("advantages"), torch.arange(len(case.case["uids"])))
    tokens = UpdateTokens(case.rows, case.mask_T, *columns, rollout_log_probs_T=case.column("rollout"))
    return select_tokens(tokens, config)


def keys(**of_loss: Any) -> Callable[[Packed], Terms]:
    """Return terms that only set keys of the loss section."""
    return lambda case: (of_loss, KlConfig(), ActorColumns())


def after(old: str, function: Function) -> Function:
    """Return the function with another column of old log-probs."""
    return lambda case: function(Packed(case.case | {"old": case.case[old]}))


def kl(name: str) -> Function:
    """Return a function for a KL estimator's values and gradient."""

    def run(case: Packed) -> Outputs:
        log_probs_T = case.column("log_probs").requires_grad_()
        kl_T = token_kl(name, log_probs_T, case.column("ref"), case.mask_T)
        (gradient_T,) = torch.autograd.grad(kl_T.sum(), log_probs_T)
        return {"value": kl_T, "gradient": gradient_T}

    return run


def advantage(name: str) -> Function:
    """Return a function for an advantage estimator. Group-wise ones return float32, so compare before that."""

    def run(case: Packed) -> Outputs:
        inputs = AdvantageInputs(
            case.rows, case.mask_T, case.column("rewards"), case.column("values"), case.per_row("baselines"),
            case.outcomes(), score_norms_T=1 - 2 * case.column("drawn").exp() + case.column("sum_squared"),
        )  # fmt: skip
        config = AlgorithmConfig(advantage=name, gamma=case.case["gamma"], lam=case.case["lam"])
        estimate = estimate_advantages(inputs, config)
        outputs: Outputs = {"advantages": estimate.advantages_T}
        if estimate.returns_T is not None:
            outputs["returns"] = estimate.returns_T
        return outputs

    return run


def aggregated(mode: str) -> Function:
    """Return a function for one mode of loss aggregation."""
    return lambda case: {"loss": case.norm(mode).aggregate(case.column("values"), case.rows, case.mask_T)}


def value_loss(case: Packed) -> Outputs:
    """Return the critic's objective, its gradient and its metrics."""
    values_T = case.column("values").requires_grad_()
    tokens = ValueTokens(case.mask_T, values_T, case.column("old_values"), case.column("returns"))
    objective = critic_objective(tokens, case.rows, case.norm("token-mean"), clip=0.3)
    (gradient_T,) = torch.autograd.grad(objective.loss, values_T)
    return {"loss": objective.loss, "gradient": gradient_T, **objective.reports}


def adaptive_kl(case: Packed) -> Outputs:
    """Return the coefficient after each of five steps."""
    controller = KLController(0.2, target=0.5, horizon_rows=100)
    coefficients = []
    for measured in np.abs(case.case["values"]).flatten()[:5].tolist():
        controller.update(measured, 16)
        coefficients.append(controller.coef)
    return {"coef": coefficients}


def pair_of(case: Packed) -> RolloutPair:
    """Return the case's tokens under both policies."""
    return RolloutPair(case.rows, case.mask_T, case.column("log_probs"), case.column("rollout"))


def importance(level: str, beyond: Literal["truncate", "mask"], upper: float, lower: float = 0.0) -> Function:
    """Return a function for the weights and their metrics."""
    config = CorrectionConfig(level=level, beyond=beyond, upper=upper, lower=lower)

    def run(case: Packed) -> Outputs:
        weights_T = correction_weights(pair_of(case), config)
        metrics = correction_metrics(pair_of(case), config)
        return {"weights": weights_T, "kept": (weights_T > 0).double(), **metrics}

    return run


def rejection(statistic: Any, upper: float, lower: float | None = None) -> Function:
    """Return a function for the tokens that a rule keeps."""
    rule = RejectionConfig(statistic=statistic, upper=upper, lower=lower)
    config = CorrectionConfig(level="none", reject=[rule])

    def run(case: Packed) -> Outputs:
        return {"kept": correction_weights(pair_of(case), config), **correction_metrics(pair_of(case), config)}

    return run


def kl_in_reward(case: Packed) -> Outputs:
    """Return the rewards after the penalty."""
    kl_T = token_kl("k1", case.column("old"), case.column("ref"), case.mask_T)
    return {"rewards": apply_kl_penalty(case.column("rewards"), kl_T, case.mask_T, 0.3)}


def group_std(case: Packed) -> Outputs:
    """Return GRPO's standard deviation over one group of all rows, which its advantages imply."""
    scores_B = case.per_row("scores")
    one_group = PromptGroups.of(["all"] * scores_B.numel())
    return {"std": (one_group.centered(scores_B).square().sum() / (scores_B.numel() - 1)).sqrt()}


def kl_term(case: Packed) -> Terms:
    """Return the terms for k3 in the loss."""
    return {}, KlConfig(where="loss", coef=0.1), ActorColumns(ref_log_probs_T=case.column("ref"))


def entropy_term(case: Packed) -> Terms:
    """Return the terms for the entropy bonus."""
    return {"entropy_coef": 0.2}, KlConfig(), ActorColumns(entropy_T=case.entropy_T)


def weights_term(case: Packed) -> Terms:
    """Return the terms for rollout correction."""
    return {}, KlConfig(), ActorColumns(rollout_weights_T=case.column("weights"))


SAPO, KL_COV = keys(tau_pos=1.0, tau_neg=1.25), keys(cov_share=0.3, cov_kl_coef=0.5)
CLIP_COV = keys(cov_share=1.0, cov_low=0.1, cov_high=5.0)
VESPO = keys(vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0)
VERL: dict[str, Function] = {
    **{f"kl {name}": kl(name) for name in ("k1", "abs", "k2", "k3", "k1+", "abs+", "k3+")},
    **{f"aggregate {mode}": aggregated(mode) for mode in AGGREGATIONS},
    **{f"advantage {name}": advantage(name) for name in ADVANTAGES},
    "advantage grpo (vectorized)": advantage("grpo"),
    "advantage rloo (vectorized)": advantage("rloo"),
    "policy ppo": policy("ppo", "token-mean", clip=(0.2, 0.2)),
    "policy ppo (clip-higher)": policy("ppo", "seq-mean-token-sum"),
    "policy ppo (rollout weights)": policy("ppo", "token-mean", terms=weights_term),
    "policy gspo": policy("gspo", "seq-mean-token-mean"),
    "policy cispo": policy("cispo", "token-mean"),
    "policy gmpo": policy("gmpo", "seq-mean-token-mean"),
    "policy gpg": policy("gpg", "seq-mean-token-mean"),
    "policy sapo": policy("sapo", "seq-mean-token-mean", terms=SAPO),
    "policy dppo_tv": after("old_below", policy("dppo_tv", "token-mean")),
    "policy dppo_kl": after("old_below", policy("dppo_kl", "token-mean")),
    "policy dro": policy("dro", "token-mean", terms=keys(dro_beta=0.05)),
    "policy clip_cov": after("old_near", policy("clip_cov", "token-mean", terms=CLIP_COV)),
    "policy kl_cov": after("old_near", policy("kl_cov", "token-mean", terms=KL_COV)),
    "value loss": value_loss,
    "entropy bonus": lambda case: {
        "loss": case.norm("token-mean").aggregate(case.entropy_T, case.rows, case.mask_T),
    },
    "adaptive kl": adaptive_kl,
    "kl in reward": kl_in_reward,
    "whitening": lambda case: {"values": whiten(case.column("values"), case.mask_T)},
    "importance token truncate": importance("token", "truncate", 2.0),
    "importance sequence truncate": importance("sequence", "truncate", 2.0),
    "importance token mask": importance("token", "mask", 1.5, 0.5),
    "importance sequence mask": importance("sequence", "mask", 1.5, 0.5),
    "importance geometric mask": importance("geometric", "mask", 1.5, 0.5),
    "rejection token_k1": rejection("token_k1", 1.5, 0.5),
    "rejection seq_sum_k1": rejection("seq_sum_k1", 1.5),
    "rejection seq_mean_k3": rejection("seq_mean_k3", 0.05),
    "rejection seq_max_k2": rejection("seq_max_k2", 0.1),
    "mismatch metrics": lambda case: dict(mismatch(case)),
}


def mismatch(case: Packed) -> Outputs:
    """Return the mismatch metrics, with verl's additional logarithms and extremes of the perplexities."""
    metrics = mismatch_metrics(pair_of(case))
    trained_B = case.rows.mean(case.column("log_probs"), case.mask_T)
    rollout_B = case.rows.mean(case.column("rollout"), case.mask_T)
    return {
        **metrics,
        "training_log_ppl": -trained_B.mean(),
        "rollout_log_ppl": -rollout_B.mean(),
        "log_ppl_diff_max": (rollout_B - trained_B).max(),
        "log_ppl_diff_min": (rollout_B - trained_B).min(),
    }


def trl_policy(name: str, mode: str, **changes: Any) -> Function:
    """Return `policy` with one advantage per row, no dual clip, and log-probs within all bounds missing in TRL."""
    function = policy(name, mode, by_row=True, **({"dual": False} | changes))
    return lambda case: function(Packed(case.case | {name: case.case[f"{name}_near"] for name in ("old", "ref")}))


def cispo_unbounded_below(case: Packed) -> Outputs:
    """Return the objective with TRL's CISPO, whose weights are only bounded from above."""
    return trl_policy("cispo", "token-mean", clip=(1.0, case.case["clip_high"]))(case)


TRL: dict[str, Function] = {
    "policy ppo, loss grpo": trl_policy("ppo", "seq-mean-token-mean"),
    "policy ppo, loss bnpo": trl_policy("ppo", "token-mean"),
    "policy ppo, loss dapo": trl_policy("ppo", "token-mean"),
    "policy ppo, loss dr_grpo": trl_policy("ppo", "seq-mean-token-sum-norm"),
    "policy ppo, two-sided clip": trl_policy("ppo", "seq-mean-token-mean", dual=True),
    "policy ppo, kl in loss": trl_policy("ppo", "seq-mean-token-mean", terms=kl_term),
    "policy ppo, rollout weights": trl_policy("ppo", "seq-mean-token-mean", terms=weights_term),
    "policy ppo, entropy bonus": trl_policy("ppo", "token-mean", terms=entropy_term),
    "policy gspo, loss luspo": trl_policy("gspo", "seq-mean-token-sum"),
    "policy gspo": trl_policy("gspo", "seq-mean-token-mean"),
    "policy cispo": cispo_unbounded_below,
    "policy sapo": trl_policy("sapo", "seq-mean-token-mean", terms=SAPO),
    "policy vespo": trl_policy("vespo", "token-mean", terms=VESPO),
    "policy ppo, off-policy masking": trl_policy("ppo", "seq-mean-token-mean", terms=keys(opsm_delta=0.05)),
    "overlong penalty": lambda case: {"penalty": overlong_penalty(torch.tensor(case.case["long_lengths"]), 100, 20)},
    "group standard deviation": group_std,
}

OURS = {"verl": VERL, "trl": TRL}
