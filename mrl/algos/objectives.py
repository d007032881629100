"""The losses of actor and critic: token losses combined and normalized over the whole batch.

Each call handles one micro-batch of one rank. Losses and reports are parts of the whole batch's: sum them over
micro-batches and ranks, without dividing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from mrl.algos.aggregate import LossNormalizer
from mrl.algos.kl import distilled_advantages, token_kl
from mrl.algos.losses import POLICY_LOSSES, PolicyTokens, ValueTokens, mask_sequences, value_loss
from mrl.algos.rows import Rows, apply_mask
from mrl.config.algorithm import DistillationConfig, KlConfig, LossConfig
from mrl.errors import BatchError


@dataclass(frozen=True)
class ActorColumns:
    """Columns that some terms read in addition to the policy loss's own columns."""

    ref_log_probs_T: Tensor | None = None
    entropy_T: Tensor | None = None
    rollout_weights_T: Tensor | None = None
    teacher_log_probs_T: Tensor | None = None
    divergence_T: Tensor | None = None
    taught_T: Tensor | None = None
    """Tokens that have a teacher. None for all."""
    teacher_spans_T: Tensor | None = None
    """Spans of a teacher with another tokenizer. None compares the policy and the teacher token by token."""


@dataclass(frozen=True)
class Objective:
    """This micro-batch's part of the loss and of the reports."""

    loss: Tensor
    reports: dict[str, Tensor]


def actor_objective(
    tokens: PolicyTokens,
    config: LossConfig,
    norm: LossNormalizer,
    extra: ActorColumns = ActorColumns(),
    kl: KlConfig | None = None,
    distillation: DistillationConfig | None = None,
) -> Objective:
    """L = agg(w * (pg + kl.coef * kl + distillation.coef * d)) - entropy_coef * agg(H), with w the rollout correction.

    The KL is included if `kl.where` says so, the divergence d from a teacher if the form of distillation is a loss, and
    the entropy if its coefficient is not 0. As an advantage, distillation is part of pg. On tokens without a teacher, d
    is 0. The engine's policy draws the tokens of these expectations; w corrects them to the trained policy.
    """
    rows, mask_T = tokens.rows, tokens.mask_T
    taught_T = mask_T if extra.taught_T is None else mask_T & extra.taught_T
    if distillation is not None:
        tokens = replace(tokens, advantages_T=distillation.reward_coef * tokens.advantages_T)
    if distillation is not None and distillation.form == "advantage":
        teacher_T = _column(extra.teacher_log_probs_T, "teacher_log_probs_T", "distillation")
        advantages_T, old_T = tokens.advantages_T, tokens.old_log_probs_T
        ratio_T = (old_T, teacher_T, taught_T)
        advantages_T = distilled_advantages(advantages_T, *ratio_T, distillation.coef, extra.teacher_spans_T)
        tokens = replace(tokens, advantages_T=advantages_T)
    policy = POLICY_LOSSES.resolve(config.policy)(tokens, config, **config.options)
    if config.opsm_delta is not None:
        policy = mask_sequences(policy, tokens, config.opsm_delta)
    terms = {"pg_loss": norm.aggregate(_weighted(policy.loss_T, extra, mask_T), rows, mask_T)}
    loss = terms["pg_loss"]
    if kl is not None and kl.where in ("loss", "both") and kl.coef:
        ref_log_probs_T = _column(extra.ref_log_probs_T, "ref_log_probs_T", "kl.coef")
        kl_T = token_kl(kl.in_loss, tokens.log_probs_T, ref_log_probs_T.detach(), mask_T)
        terms["kl_loss"] = norm.aggregate(_weighted(kl_T, extra, mask_T), rows, mask_T)
        loss = loss + kl.coef * terms["kl_loss"]
    if distillation is not None and distillation.form != "advantage":
        distance_T = _weighted(_teacher_distance(distillation, tokens, extra, taught_T), extra, mask_T)
        terms["distill_loss"] = norm.aggregate(distance_T, rows, mask_T)
        loss = loss + distillation.coef * terms["distill_loss"]
    if config.entropy_coef:
        entropy_T = _column(extra.entropy_T, "entropy_T", "entropy_coef")
        terms["entropy"] = norm.aggregate(entropy_T, rows, mask_T)
        loss = loss - config.entropy_coef * terms["entropy"]
    reports = {name: term.detach() for name, term in terms.items()}
    return Objective(loss, reports | _reports(policy.reports_T, norm, mask_T))


def _weighted(loss_T: Tensor, extra: ActorColumns, mask_T: Tensor) -> Tensor:
    weights_T = extra.rollout_weights_T
    return loss_T if weights_T is None else loss_T * apply_mask(weights_T, mask_T).detach()


def _teacher_distance(
    config: DistillationConfig, tokens: PolicyTokens, extra: ActorColumns, taught_T: Tensor
) -> Tensor:
    """Return the distance of the policy from the teacher at each token, as an estimate or a divergence."""
    if config.form != "sampled":
        return apply_mask(_column(extra.divergence_T, "divergence_T", "distillation.coef"), taught_T)
    teacher_T = _column(extra.teacher_log_probs_T, "teacher_log_probs_T", "distillation.coef").detach()
    return token_kl(config.estimator, tokens.log_probs_T, teacher_T, taught_T)


def critic_objective(tokens: ValueTokens, rows: Rows, norm: LossNormalizer, clip: float | None = 0.5) -> Objective:
    value = value_loss(tokens, clip)
    loss = norm.aggregate(value.loss_T, rows, tokens.mask_T)
    return Objective(loss, {"vf_loss": loss.detach()} | _reports(value.reports_T, norm, tokens.mask_T))


def _reports(reports_T: dict[str, Tensor], norm: LossNormalizer, mask_T: Tensor) -> dict[str, Tensor]:
    num_tokens = max(norm.num_tokens, 1.0)
    return {name: apply_mask(value_T, mask_T).sum() / num_tokens for name, value_T in reports_T.items()}


def _column(values: Tensor | None, column: str, because: str) -> Tensor:
    if values is None:
        raise BatchError(f"the actor's loss needs `{column}` because `{because}` is not 0, but it is missing")
    return values
