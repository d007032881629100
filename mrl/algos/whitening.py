"""Mean 0 and variance 1 over the whole batch, whatever ranks its tokens are on."""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.algos.rows import Reduce, apply_mask, identity

VARIANCE_FLOOR = 1e-8


def global_moments(x_T: Tensor, mask_T: Tensor, sum_over_ranks: Reduce = identity) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance of the unmasked tokens of all ranks, in float64.

    mean = sum x / N,  var = sum (x - mean)^2 / (N - 1); both 0 for N = 0, var 0 for N = 1.
    Two passes: E[x^2] - E[x]^2 loses everything when the mean is large. A rank without tokens still takes part
    in both reductions, or the others would wait for it.
    """
    x_T = apply_mask(x_T.to(torch.float64), mask_T)
    count, total = sum_over_ranks(torch.stack([mask_T.sum().to(torch.float64), x_T.sum()])).unbind()
    mean = total / count.clamp(min=1)
    squares = sum_over_ranks(apply_mask((x_T - mean).square(), mask_T).sum())
    return mean, squares / (count - 1).clamp(min=1)


def whiten(x_T: Tensor, mask_T: Tensor, sum_over_ranks: Reduce = identity) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over the unmasked tokens of all ranks; 0 on masked tokens."""
    mean, variance = global_moments(x_T, mask_T, sum_over_ranks)
    return apply_mask(((x_T - mean) * torch.rsqrt(variance + VARIANCE_FLOOR)).to(x_T.dtype), mask_T)
