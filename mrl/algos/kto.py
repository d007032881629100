"""KTO (arXiv 2402.01306): learns from single responses, each of which is labeled desirable or undesirable.

Each call handles one micro-batch of one rank. The baseline z is computed beforehand from the whole update, so losses
and reports add up to those of the update in any split.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.algos.objectives import Objective
from mrl.algos.rows import Reduce, Rows, apply_mask, at_least_float32, identity
from mrl.config.sft import DpoLossConfig


@dataclass(frozen=True)
class LabelTotals:
    """Numbers of desirable and undesirable responses in one update."""

    num_desirable: float
    num_undesirable: float

    @classmethod
    def of(cls, is_desirable_B: Tensor, sum_over_ranks: Reduce = identity) -> LabelTotals:
        local = torch.stack([is_desirable_B.sum(), (~is_desirable_B).sum()]).to(torch.float64)
        return cls(*sum_over_ranks(local).tolist())

    @property
    def num_rows(self) -> float:
        return self.num_desirable + self.num_undesirable


@dataclass(frozen=True)
class LabeledTokens:
    """Log-probs of a policy on labeled responses. Only `log_probs_T` is differentiated."""

    rows: Rows
    mask_T: Tensor
    log_probs_T: Tensor
    ref_log_probs_T: Tensor
    is_desirable_B: Tensor
    baseline_B: Tensor
    """The baseline z of the update, on each row."""


def kto_baseline(log_ratio_B: Tensor) -> float:
    """Return z = max(0, mean of log pi - log pi_ref) over mismatched pairs: prompts with responses to other prompts."""
    return float(log_ratio_B.mean().clamp(min=0))


def kto_losses(log_ratio_B: Tensor, is_desirable_B: Tensor, baseline_B: Tensor, config: DpoLossConfig) -> Tensor:
    """KTO (arXiv 2402.01306): l = lambda_D (1 - sigmoid(beta (r - z))), with r a log-ratio and z its baseline.

    Of undesirable responses, it is lambda_U (1 - sigmoid(beta (z - r))). r is that of policy and reference.
    """
    above_B = log_ratio_B - baseline_B.detach()
    return torch.where(
        is_desirable_B,
        config.desirable_weight * torch.sigmoid(-config.beta * above_B),
        config.undesirable_weight * torch.sigmoid(config.beta * above_B),
    )


def kto_objective(tokens: LabeledTokens, config: DpoLossConfig, totals: LabelTotals) -> Objective:
    """L = the mean of `kto_losses` over the rows of the update. A row on its label's side of z is accurate."""
    rows, mask_T, is_desirable_B = tokens.rows, tokens.mask_T, tokens.is_desirable_B
    log_probs_T = at_least_float32(apply_mask(tokens.log_probs_T, mask_T))
    # Subtract per token first, as for pairs: the difference of two large sums would be mostly rounding error.
    ratio_T = log_probs_T - at_least_float32(apply_mask(tokens.ref_log_probs_T, mask_T)).detach()
    ratio_B = rows.sum(ratio_T)
    baseline_B = tokens.baseline_B.to(ratio_B)
    loss = kto_losses(ratio_B, is_desirable_B, baseline_B, config).sum() / totals.num_rows
    ratio_B = ratio_B.detach()
    side_B = (ratio_B - baseline_B).sign() * torch.where(is_desirable_B, 1, -1)
    reports = {
        "accuracy": (0.5 * (side_B + 1)).sum() / totals.num_rows,
        "kl_baseline": baseline_B.sum() / totals.num_rows,
    }
    log_prob_B = rows.mean(log_probs_T.detach(), mask_T)
    for name, is_labeled_B, num in (
        ("desirable", is_desirable_B, totals.num_desirable),
        ("undesirable", ~is_desirable_B, totals.num_undesirable),
    ):
        if num:  # an update may have responses of one label only
            reports[f"reward/{name}"] = config.beta * apply_mask(ratio_B, is_labeled_B).sum() / num
            reports[f"log_prob/{name}"] = apply_mask(log_prob_B, is_labeled_B).sum() / num
    return Objective(loss, {"loss": loss.detach(), **reports})
