"""Losses per token: the policy's, which follows the advantages within a limit, and the critic's.

A policy loss is `(PolicyTokens, LossConfig) -> TokenLosses`: a loss and values to report, per token. Aggregation is
separate. r_t = exp(log pi - log pi_old), with log-ratios limited to +-20.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mrl.algos.rows import Rows, apply_mask
from mrl.config.algorithm import LossConfig
from mrl.errors import BatchError
from mrl.registry import Registry

LOG_RATIO_BOUND = 20.0
GSPO_LOG_RATIO_BOUND = 10.0
DPPO_RATIO_BOUND = 20.0
_LARGEST_PROBABILITY = 1 - 1e-6
_ROUNDING = 1e-3
"""Logarithm of a ratio that may be rounding, and counts as not clipped."""


@dataclass(frozen=True)
class PolicyTokens:
    """Inputs of a policy loss. Only `log_probs_T` is differentiated."""

    rows: Rows
    mask_T: Tensor
    log_probs_T: Tensor
    old_log_probs_T: Tensor
    advantages_T: Tensor
    selected_T: Tensor | None = None
    """For `clip_cov`, `kl_cov` and `m2po`: the tokens of `mrl.algos.chosen_tokens.select_tokens`."""

    @property
    def log_ratio_T(self) -> Tensor:
        """log pi - log pi_old, 0 on masked tokens."""
        return apply_mask(self.log_probs_T, self.mask_T) - apply_mask(self.old_log_probs_T, self.mask_T).detach()

    @property
    def probability_T(self) -> Tensor:
        """pi, as a constant below 1."""
        return apply_mask(self.log_probs_T, self.mask_T).detach().exp().clamp(max=_LARGEST_PROBABILITY)

    @property
    def old_probability_T(self) -> Tensor:
        """pi_old, as a constant below 1."""
        return apply_mask(self.old_log_probs_T.detach(), self.mask_T).exp().clamp(max=_LARGEST_PROBABILITY)

    @property
    def advantage_T(self) -> Tensor:
        """The advantages as constants, 0 on masked tokens."""
        return apply_mask(self.advantages_T, self.mask_T).detach()


@dataclass(frozen=True)
class TokenLosses:
    """A loss and values to report, per token. Reports are averaged like token-mean."""

    loss_T: Tensor
    reports_T: dict[str, Tensor]


PolicyLoss = Callable[..., TokenLosses]
"""Called with PolicyTokens and LossConfig. Your own also gets `algorithm.loss.options`, as keywords."""
POLICY_LOSSES: Registry[PolicyLoss] = Registry("policy loss")


def _clip(ratio_T: Tensor, config: LossConfig) -> Tensor:
    """Clip the ratio to the trust region. Clip-higher sets `clip_high` above `clip_low`."""
    return ratio_T.clamp(1 - config.clip_low, 1 + config.clip_high)


def _losses(
    loss_T: Tensor, log_ratio_T: Tensor, clipped_T: Tensor, clipped_lower_T: Tensor | None = None
) -> TokenLosses:
    reports_T = {"pg_clipfrac": clipped_T, "ppo_kl": -log_ratio_T}
    if clipped_lower_T is not None:
        reports_T["pg_clipfrac_lower"] = clipped_lower_T
    return TokenLosses(loss_T, {name: value.detach().to(loss_T.dtype) for name, value in reports_T.items()})


@POLICY_LOSSES.register("vanilla")
@POLICY_LOSSES.register("ppo")
def ppo(tokens: PolicyTokens, config: LossConfig) -> TokenLosses:
    """PPO (arXiv 1707.06347): l_t = max(-A r_t, -A clip(r_t)); with dual clip, where A < 0, min(l_t, -A c)."""
    advantage_T = tokens.advantage_T
    log_ratio_T = tokens.log_ratio_T.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio_T = log_ratio_T.exp()
    unclipped_T, clipped_T = -advantage_T * ratio_T, -advantage_T * _clip(ratio_T, config)
    loss_T = torch.maximum(unclipped_T, clipped_T)
    beyond_T = torch.zeros_like(tokens.mask_T)
    if config.dual_clip is not None:
        bound_T = -advantage_T * config.dual_clip
        beyond_T = (advantage_T < 0) & (loss_T > bound_T)
        loss_T = torch.where(beyond_T, bound_T, loss_T)
    return _losses(loss_T, log_ratio_T, clipped_T > unclipped_T, beyond_T)


@POLICY_LOSSES.register("gspo")
def gspo(tokens: PolicyTokens, config: LossConfig) -> TokenLosses:
    """GSPO (arXiv 2507.18071): PPO's clipped loss with the row's ratio s = exp(mean_t log r_t), at most e^10.

    This is the paper's GSPO-token. With seq-mean-token-sum, it is LUSPO (arXiv 2602.05261).

    Each token's gradient is s * grad log pi_t: s_t = sg[s] * pi_t / sg[pi_t]. Use it with seq-mean-token-mean.
    """
    advantage_T, log_ratio_T = tokens.advantage_T, tokens.log_ratio_T
    row_T = tokens.rows.expand(tokens.rows.mean(log_ratio_T.detach(), tokens.mask_T))
    ratio_T = (log_ratio_T - log_ratio_T.detach() + row_T).clamp(max=GSPO_LOG_RATIO_BOUND).exp()
    unclipped_T, clipped_T = -advantage_T * ratio_T, -advantage_T * _clip(ratio_T, config)
    return _losses(torch.maximum(unclipped_T, clipped_T), log_ratio_T, clipped_T > unclipped_T)


@POLICY_LOSSES.register("cispo")
def cispo(tokens: PolicyTokens, config: LossConfig) -> TokenLosses:
    """CISPO (arXiv 2506.13585): l_t = -sg[clip(r_t)] A log pi_t. No token loses its gradient."""
    log_ratio_T = tokens.log_ratio_T.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio_T = log_ratio_T.detach().exp()
    weight_T = _clip(ratio_T, config)
    loss_T = -weight_T * tokens.advantage_T * apply_mask(tokens.log_probs_T, tokens.mask_T)
    return _losses(loss_T, log_ratio_T, weight_T != ratio_T)


@POLICY_LOSSES.register("geo_mean")
@POLICY_LOSSES.register("gmpo")
def gmpo(tokens: PolicyTokens, config: LossConfig) -> TokenLosses:
    """GMPO (arXiv 2507.20673): l = -A exp(mean_t x_t), one loss per row, with A the row's mean advantage.

    x_t = sgn(A_t) min(sgn(A_t) log r_t, sgn(A_t) clip(log r_t, -clip_low, clip_high)): the pessimistic clip, in the
    logarithm. Each token carries its row's loss, so seq-mean-token-mean is the paper's mean over rows.
    """
    rows, mask_T, advantage_T = tokens.rows, tokens.mask_T, tokens.advantage_T
    log_ratio_T = tokens.log_ratio_T.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    within_T = log_ratio_T.clamp(-config.clip_low, config.clip_high)
    sign_T = advantage_T.sign()
    bounded_T = sign_T * torch.minimum(sign_T * log_ratio_T, sign_T * within_T)
    loss_B = -rows.mean(advantage_T, mask_T) * rows.mean(bounded_T, mask_T).exp()
    clipped_T = within_T != log_ratio_T
    return _losses(rows.expand(loss_B), log_ratio_T, clipped_T & (advantage_T > 0), clipped_T & (advantage_T < 0))


@POLICY_LOSSES.register("gpg")
def gpg(tokens: PolicyTokens, config: LossConfig) -> TokenLosses:
    """GPG (arXiv 2504.02546): l_t = -A log pi_t, without a ratio or clipping (REINFORCE)."""
    loss_T = -tokens.advantage_T * apply_mask(tokens.log_probs_T, tokens.mask_T)
    return _losses(loss_T, tokens.log_ratio_T, torch.zeros_like(tokens.mask_T))


@POLICY_LOSSES.register("sapo")
def sapo(tokens: PolicyTokens, config: LossConfig) -> TokenLosses:
    """SAPO (arXiv 2511.20347): l_t = -A 4/tau sigmoid(tau (r_t - 1)), a soft gate instead of a clip.

    tau is tau_pos where A > 0, otherwise tau_neg. At r_t = 1 the gradient is that of PPO.
    """
    advantage_T = tokens.advantage_T
    log_ratio_T = tokens.log_ratio_T.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    tau_T = torch.full_like(advantage_T, config.tau_neg).masked_fill(advantage_T > 0, config.tau_pos)
    gate_T = 4 / tau_T * torch.sigmoid(tau_T * (log_ratio_T.exp() - 1))
    return _losses(-advantage_T * gate_T, log_ratio_T, torch.zeros_like(tokens.mask_T))


@POLICY_LOSSES.register("dppo_tv")
def dppo_tv(tokens: PolicyTokens, config: LossConfig) -> TokenLosses:
    """DPPO-TV (arXiv 2602.04879): l_t = -sg[min(r_t, 20)] A log pi_t, 0 where |pi_t - pi_old_t| is too large.

    Drops a token that would leave the trust region further: A > 0 and pi_t - pi_old_t > clip_high, or A <= 0 and
    pi_old_t - pi_t > clip_low. |pi_t - pi_old_t| is the total variation of a token and all others.
    """
    change_T = tokens.probability_T - tokens.old_probability_T
    outside_T = torch.where(tokens.advantage_T > 0, change_T > config.clip_high, -change_T > config.clip_low)
    return _divergence_ppo(tokens, outside_T)


@POLICY_LOSSES.register("dppo_kl")
def dppo_kl(tokens: PolicyTokens, config: LossConfig) -> TokenLosses:
    """DPPO-KL (arXiv 2602.04879): l_t = -sg[min(r_t, 20)] A log pi_t, 0 where KL(pi_old || pi) is too large.

    The KL is that of a token and all others: q log q/p + (1 - q) log (1 - q)/(1 - p). Drops a token if A > 0, its
    probability has grown, and the KL exceeds clip_high; or if A <= 0, its probability has fallen, and the KL exceeds
    clip_low.
    """
    p_T, q_T = tokens.probability_T, tokens.old_probability_T
    kl_T = q_T * (q_T.log() - p_T.log()) + (1 - q_T) * (torch.log1p(-q_T) - torch.log1p(-p_T))
    rises_T, falls_T = (p_T > q_T) & (kl_T > config.clip_high), (p_T < q_T) & (kl_T > config.clip_low)
    return _divergence_ppo(tokens, torch.where(tokens.advantage_T > 0, rises_T, falls_T))


def _divergence_ppo(tokens: PolicyTokens, outside_T: Tensor) -> TokenLosses:
    log_ratio_T = tokens.log_ratio_T.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    weight_T = log_ratio_T.detach().exp().clamp(max=DPPO_RATIO_BOUND) * ~outside_T
    loss_T = -weight_T * tokens.advantage_T * apply_mask(tokens.log_probs_T, tokens.mask_T)
    return _losses(loss_T, log_ratio_T, outside_T & tokens.mask_T)


@POLICY_LOSSES.register("topr")
def topr(tokens: PolicyTokens, config: LossConfig) -> TokenLosses:
    """TOPR (arXiv 2503.14286): l_t = -A log pi_t, with A < 0 weighted by the row's ratio, at most 1.

    The ratio is exp(sum_t log r_t), as a constant. Use it with seq-mean-token-sum.
    """
    advantage_T, log_ratio_T = tokens.advantage_T, tokens.log_ratio_T
    row_T = tokens.rows.expand(tokens.rows.sum(log_ratio_T.detach()))
    falls_T = advantage_T < 0
    weight_T = torch.where(falls_T, row_T.clamp(-LOG_RATIO_BOUND, 0).exp(), 1.0)
    loss_T = -weight_T * advantage_T * apply_mask(tokens.log_probs_T, tokens.mask_T)
    return _losses(loss_T, log_ratio_T, falls_T & (row_T > _ROUNDING))


@POLICY_LOSSES.register("dro")
def dro(tokens: PolicyTokens, config: LossConfig) -> TokenLosses:
    """DRO (arXiv 2405.19107): l_t = -A log pi_t + dro_beta / 2 (log r_t)^2, a quadratic penalty instead of a clip."""
    log_ratio_T = tokens.log_ratio_T.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    gain_T = tokens.advantage_T * apply_mask(tokens.log_probs_T, tokens.mask_T)
    return _losses(0.5 * config.dro_beta * log_ratio_T.square() - gain_T, log_ratio_T, torch.zeros_like(tokens.mask_T))


@POLICY_LOSSES.register("vespo")
def vespo(tokens: PolicyTokens, config: LossConfig) -> TokenLosses:
    """VESPO (arXiv 2602.10693): l_t = -sg[w^k exp(lambda (1 - w))] A log pi_t, with w the row's ratio.

    w is exp(sum_t log r_t). k and lambda are vespo_k_pos and vespo_lambda_pos where A >= 0, otherwise vespo_k_neg and
    vespo_lambda_neg. The weight is 1 for w = 1, and falls to 0 for both small and large w.
    """
    advantage_T, log_ratio_T = tokens.advantage_T, tokens.log_ratio_T
    falls_T = advantage_T < 0
    row_T = tokens.rows.expand(tokens.rows.sum(log_ratio_T.detach())).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    k_T = torch.full_like(row_T, config.vespo_k_pos).masked_fill(falls_T, config.vespo_k_neg)
    lambda_T = torch.full_like(row_T, config.vespo_lambda_pos).masked_fill(falls_T, config.vespo_lambda_neg)
    weight_T = (k_T * row_T + lambda_T * (1 - row_T.exp())).exp()
    loss_T = -weight_T * advantage_T * apply_mask(tokens.log_probs_T, tokens.mask_T)
    return _losses(loss_T, log_ratio_T, torch.zeros_like(tokens.mask_T))


@POLICY_LOSSES.register("clip_cov")
def clip_cov(tokens: PolicyTokens, config: LossConfig) -> TokenLosses:
    """Clip-Cov (arXiv 2505.22617): PPO, but l_t = 0 for a random share of the tokens with a high covariance.

    Cov_t = (log pi_old_t - mean) (A_t - mean), with means over the update. Drops cov_share of all tokens, drawn from
    those with cov_low < Cov_t < cov_high.
    """
    clipped, selected_T = ppo(tokens, replace(config, dual_clip=None)), _selected(tokens)
    losses = _losses(
        clipped.loss_T.masked_fill(selected_T, 0.0),
        -clipped.reports_T["ppo_kl"],
        clipped.reports_T["pg_clipfrac"].masked_fill(selected_T, 0.0),
    )
    return _with_share(losses, selected_T)


@POLICY_LOSSES.register("kl_cov")
def kl_cov(tokens: PolicyTokens, config: LossConfig) -> TokenLosses:
    """KL-Cov (arXiv 2505.22617): l_t = -A r_t, plus cov_kl_coef |log r_t| for tokens with the highest covariance.

    Cov_t is that of `clip_cov`. Penalizes the cov_share of all tokens that has the highest.
    """
    selected_T = _selected(tokens)
    log_ratio_T = tokens.log_ratio_T.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    penalty_T = config.cov_kl_coef * log_ratio_T.abs().masked_fill(~selected_T, 0.0)
    loss_T = penalty_T - tokens.advantage_T * log_ratio_T.exp()
    return _with_share(_losses(loss_T, log_ratio_T, torch.zeros_like(selected_T)), selected_T)


@POLICY_LOSSES.register("m2po")
def m2po(tokens: PolicyTokens, config: LossConfig) -> TokenLosses:
    """M2PO (arXiv 2510.01161): l_t = -A r_t, 0 for the tokens farthest from the policy that drew them.

    Drops the fewest tokens of an update that leave a mean (log pi_old - log pi_engine)^2 of at most m2_threshold. It
    is for old samples, and nothing else bounds the ratio.
    """
    selected_T, log_ratio_T = _selected(tokens), tokens.log_ratio_T.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    loss_T = (-tokens.advantage_T * log_ratio_T.exp()).masked_fill(selected_T, 0.0)
    losses = _losses(loss_T, log_ratio_T, torch.zeros_like(selected_T))
    return TokenLosses(loss_T, losses.reports_T | {"m2_masked": selected_T.to(loss_T.dtype)})


def _with_share(losses: TokenLosses, selected_T: Tensor) -> TokenLosses:
    """Report the selected tokens, too. They do not count as clipped: there are some even if the policy is unchanged."""
    return TokenLosses(losses.loss_T, losses.reports_T | {"cov_selected": selected_T.to(losses.loss_T.dtype)})


def _selected(tokens: PolicyTokens) -> Tensor:
    if tokens.selected_T is None:
        raise BatchError("this policy loss needs `selected_T`, the tokens that it treats differently, which is missing")
    return tokens.selected_T & tokens.mask_T


def mask_sequences(losses: TokenLosses, tokens: PolicyTokens, delta: float) -> TokenLosses:
    """OPSM (arXiv 2512.02556): l_t = 0 where A_t < 0, for rows with mean_t -log r_t > delta.

    A bad answer that the policy has become unlikely to give teaches nothing more. Its tokens still count in means.
    """
    log_ratio_T = tokens.log_ratio_T.detach()
    far_T = tokens.rows.expand(-tokens.rows.mean(log_ratio_T, tokens.mask_T) > delta)
    masked_T = far_T & (tokens.advantage_T < 0)
    reports_T = losses.reports_T | {"opsm_masked": masked_T.to(losses.loss_T.dtype)}
    return TokenLosses(losses.loss_T.masked_fill(masked_T, 0.0), reports_T)


@dataclass(frozen=True)
class ValueTokens:
    """Inputs of the critic's loss. Only `values_T`, the critic's new answer, is differentiated."""

    mask_T: Tensor
    values_T: Tensor
    old_values_T: Tensor
    returns_T: Tensor


def value_loss(tokens: ValueTokens, clip: float | None = 0.5) -> TokenLosses:
    """Return l_t = 1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2), or 1/2 (V - R)^2 without a clip."""
    values_T, returns_T = (
        apply_mask(tokens.values_T, tokens.mask_T),
        apply_mask(tokens.returns_T, tokens.mask_T).detach(),
    )
    error_T = (values_T - returns_T).square()
    worst_T = error_T
    if clip is not None:
        old_T = apply_mask(tokens.old_values_T, tokens.mask_T).detach()
        worst_T = torch.maximum(error_T, (values_T.clamp(old_T - clip, old_T + clip) - returns_T).square())
    clipped_T = (worst_T > error_T).to(values_T.dtype)
    return TokenLosses(0.5 * worst_T, {"vf_clipfrac": clipped_T, "vpred_mean": values_T.detach()})
