"""Losses on ranked responses, for a reward model, and for a policy without a reward model.

Each call handles one micro-batch of one rank, with whole groups: the ranked responses to one prompt. A group of two has
one pair; a longer list has a pair for each two responses of different rank. The pairs of a group have a total weight of
one. Losses and reports are parts of the whole update's, and add up to it in any split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from mrl.algos.aggregate import LossNormalizer
from mrl.algos.objectives import Objective
from mrl.algos.rows import Reduce, Rows, apply_mask, at_least_float32, identity
from mrl.config.sft import DpoLossConfig, RewardLossConfig
from mrl.registry import Registry


@dataclass(frozen=True)
class Pairs:
    """Positions of the preferred and of the other response of each pair, and the weight of the pair."""

    better_P: Tensor
    worse_P: Tensor
    weight_P: Tensor

    @classmethod
    def of(cls, group_B: Tensor, rank_B: Tensor) -> Pairs:
        """Return all pairs within groups. The lower rank is better; equal ranks form no pair."""
        is_pair = (group_B[:, None] == group_B) & (rank_B[:, None] < rank_B)
        better_P, worse_P = is_pair.nonzero(as_tuple=True)
        _, group_P, num_G = torch.unique(group_B[better_P], return_inverse=True, return_counts=True)
        return cls(better_P, worse_P, 1.0 / num_G[group_P].double())


@dataclass(frozen=True)
class RankingTotals:
    """Denominators of one update."""

    num_groups: float
    num_rows: float

    @classmethod
    def of(cls, group_B: Tensor, sum_over_ranks: Reduce = identity) -> RankingTotals:
        """Count groups and rows of all ranks. Each rank holds whole groups."""
        local = torch.tensor([torch.unique(group_B).numel(), group_B.numel()], dtype=torch.float64)
        return cls(*sum_over_ranks(local).tolist())


def reward_objective(
    score_B: Tensor, pairs: Pairs, label_B: Tensor, config: RewardLossConfig, totals: RankingTotals
) -> Objective:
    """L = sum_p w_p l(s_better - s_worse - m_p) / G + centering * sum_p w_p (s_better + s_worse)^2 / G.

    l is -log sigmoid, smoothed by `smoothing`; m_p is the difference of the labels if `margin` is set. The loss
    `regression` is the mean of (s - label)^2 over the rows instead.
    """
    score_B = at_least_float32(score_B)
    weight_P = (pairs.weight_P / totals.num_groups).to(score_B)
    better_P, worse_P = score_B[pairs.better_P], score_B[pairs.worse_P]
    margin_P = (better_P - worse_P).detach()
    reports = {
        "accuracy": (weight_P * (0.5 * (margin_P.sign() + 1))).sum(),
        "margin": (weight_P * margin_P).sum(),
        "score": score_B.detach().sum() / totals.num_rows,
    }
    if config.loss == "regression":
        loss = (score_B - label_B.to(score_B)).square().sum() / totals.num_rows
    else:
        gap_P = better_P - worse_P
        if config.margin:
            gap_P = gap_P - (label_B[pairs.better_P] - label_B[pairs.worse_P]).to(gap_P)
        loss = (weight_P * _smoothed(gap_P, config.smoothing)).sum()
    if config.centering:
        loss = loss + config.centering * (weight_P * (better_P + worse_P).square()).sum()
    return Objective(loss, {"loss": loss.detach(), **reports})


@dataclass(frozen=True)
class PairLogProbs:
    """Log-probs of each pair's responses, summed over their tokens, minus the reference's if there is one."""

    better_P: Tensor
    worse_P: Tensor
    num_better_P: Tensor
    num_worse_P: Tensor

    def gap(self, *, of_means: bool) -> Tensor:
        """Return how much likelier, relative to the reference, the better response has become than the worse."""
        if of_means:
            return self.better_P / self.num_better_P - self.worse_P / self.num_worse_P
        return self.better_P - self.worse_P


PreferenceLoss = Callable[[PairLogProbs, DpoLossConfig], Tensor]
PREFERENCE_LOSSES: Registry[PreferenceLoss] = Registry("preference loss")


def _smoothed(gap_P: Tensor, smoothing: float) -> Tensor:
    """Return -log sigmoid of the gap, mixed with that of the negated gap by `smoothing`."""
    return (1 - smoothing) * softplus(-gap_P) + smoothing * softplus(gap_P)


@PREFERENCE_LOSSES.register("sigmoid")
def sigmoid(pairs: PairLogProbs, config: DpoLossConfig) -> Tensor:
    """DPO (arXiv 2305.18290): l = -log sigmoid(beta d), with d the gap of a pair's log-ratios."""
    return softplus(-config.beta * pairs.gap(of_means=config.average))


@PREFERENCE_LOSSES.register("conservative")
def conservative(pairs: PairLogProbs, config: DpoLossConfig) -> Tensor:
    """cDPO: l = -(1 - e) log sigmoid(beta d) - e log sigmoid(-beta d), with e the share of wrong labels, `smoothing`.

    The gap has a finite optimum.
    """
    return _smoothed(config.beta * pairs.gap(of_means=config.average), config.smoothing)


@PREFERENCE_LOSSES.register("robust")
def robust(pairs: PairLogProbs, config: DpoLossConfig) -> Tensor:
    """rDPO (arXiv 2403.00409): l = ((1 - e) L(d) - e L(-d)) / (1 - 2 e), with L the loss of DPO, and e as in cDPO.

    It is unbiased if a share e of the labels is wrong, and may be negative.
    """
    gap_P, wrong = config.beta * pairs.gap(of_means=config.average), config.smoothing
    return ((1 - wrong) * softplus(-gap_P) - wrong * softplus(gap_P)) / (1 - 2 * wrong)


@PREFERENCE_LOSSES.register("hinge")
def hinge(pairs: PairLogProbs, config: DpoLossConfig) -> Tensor:
    """SLiC-HF (arXiv 2305.10425): l = max(0, 1 - beta d)."""
    return (1 - config.beta * pairs.gap(of_means=config.average)).relu()


@PREFERENCE_LOSSES.register("ipo_sum")
def ipo_sum(pairs: PairLogProbs, config: DpoLossConfig) -> Tensor:
    """IPO (arXiv 2310.12036): l = (d - 1 / (2 beta))^2 of summed log-probs."""
    return (pairs.gap(of_means=False) - 0.5 / config.beta).square()


@PREFERENCE_LOSSES.register("ipo_mean")
def ipo_mean(pairs: PairLogProbs, config: DpoLossConfig) -> Tensor:
    """IPO with means (arXiv 2310.12036): l = (d - 1 / (2 beta))^2 of mean log-probs. Its optimum differs from IPO's."""
    return (pairs.gap(of_means=True) - 0.5 / config.beta).square()


@PREFERENCE_LOSSES.register("simpo")
def simpo(pairs: PairLogProbs, config: DpoLossConfig) -> Tensor:
    """SimPO (arXiv 2405.14734): l = -log sigmoid(beta d - gamma) of the policy's own mean log-probs."""
    return _smoothed(config.beta * pairs.gap(of_means=True) - config.gamma, config.smoothing)


@PREFERENCE_LOSSES.register("orpo")
def orpo(pairs: PairLogProbs, config: DpoLossConfig) -> Tensor:
    """ORPO (arXiv 2403.07691): l = -beta log sigmoid(log odds ratio) of the policy's own mean log-probs.

    `sft_weight` adds its likelihood.
    """
    better_P, worse_P = pairs.better_P / pairs.num_better_P, pairs.worse_P / pairs.num_worse_P
    log_odds_P = better_P - worse_P - (_log_of_rest(better_P) - _log_of_rest(worse_P))
    return config.beta * softplus(-log_odds_P)


def _log_of_rest(log_prob: Tensor) -> Tensor:
    """Return log(1 - p), accurate for p close to 0 and close to 1."""
    is_large = log_prob > -0.6931471805599453
    by_expm1 = torch.log(-torch.expm1(torch.where(is_large, log_prob, -1.0)))
    return torch.where(is_large, by_expm1, torch.log1p(-torch.exp(torch.where(is_large, -1.0, log_prob))))


@dataclass(frozen=True)
class RankedTokens:
    """Log-probs of a policy on ranked responses. Only `log_probs_T` is differentiated."""

    rows: Rows
    mask_T: Tensor
    log_probs_T: Tensor
    ref_log_probs_T: Tensor | None
    """Log-probs of the model before training. None for losses without a reference."""
    pairs: Pairs
    is_best_T: Tensor
    """Whether the token's response is the best of its group, which `sft_weight` learns."""


def preference_objective(
    tokens: RankedTokens, config: DpoLossConfig, norm: LossNormalizer, totals: RankingTotals
) -> Objective:
    """L = sum_p w_p loss(p) / G + sft_weight * (minus the mean log-prob of the tokens of the best responses)."""
    rows, mask_T, pairs = tokens.rows, tokens.mask_T, tokens.pairs
    log_probs_T = at_least_float32(apply_mask(tokens.log_probs_T, mask_T))
    ratio_T = log_probs_T
    if tokens.ref_log_probs_T is not None:
        # Subtract per token first: sums of long responses are large, and their difference would be mostly rounding
        # error.
        ratio_T = log_probs_T - at_least_float32(apply_mask(tokens.ref_log_probs_T, mask_T)).detach()
    ratio_B, num_B = rows.sum(ratio_T), rows.count(mask_T).clamp(min=1).to(ratio_T)
    pair_log_probs = PairLogProbs(
        ratio_B[pairs.better_P], ratio_B[pairs.worse_P], num_B[pairs.better_P], num_B[pairs.worse_P]
    )
    weight_P = (pairs.weight_P / totals.num_groups).to(ratio_T)
    loss = (weight_P * PREFERENCE_LOSSES.resolve(config.loss)(pair_log_probs, config)).sum()
    log_prob_B = rows.mean(log_probs_T.detach(), mask_T)
    reward_B = config.beta * ratio_B.detach() / (num_B if config.is_of_means() else 1.0)
    reward_P = {"chosen": reward_B[pairs.better_P], "rejected": reward_B[pairs.worse_P]}
    margin_P = reward_P["chosen"] - reward_P["rejected"]
    reports_P = {
        "accuracy": 0.5 * (margin_P.sign() + 1),
        "reward/margin": margin_P,
        **{f"reward/{name}": value_P for name, value_P in reward_P.items()},
        "log_prob/chosen": log_prob_B[pairs.better_P],
        "log_prob/rejected": log_prob_B[pairs.worse_P],
    }
    reports = {name: (weight_P * value_P.to(weight_P)).sum() for name, value_P in reports_P.items()}
    if config.sft_weight:
        reports["sft_loss"] = norm.aggregate(-log_probs_T, rows, mask_T & tokens.is_best_T)
        loss = loss + config.sft_weight * reports["sft_loss"]
        reports["sft_loss"] = reports["sft_loss"].detach()
    return Objective(loss, {"loss": loss.detach(), **reports})
