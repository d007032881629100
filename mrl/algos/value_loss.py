"""The critic's loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.algos.policy_losses import TokenLosses
from mrl.algos.rows import apply_mask


@dataclass(frozen=True)
class ValueTokens:
    """What the critic's loss reads. Only `values_T`, the critic's new answer, is differentiated."""

    mask_T: Tensor
    values_T: Tensor
    old_values_T: Tensor
    returns_T: Tensor


def value_loss(tokens: ValueTokens, clip: float | None = 0.5) -> TokenLosses:
    """l_t = 1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2); without a clip 1/2 (V - R)^2."""
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
