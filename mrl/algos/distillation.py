"""On-policy distillation: how far the policy is from a teacher, at what the policy itself wrote.

pi is the policy's and nu the teacher's distribution of the next token behind the same tokens, both at the temperature
of sampling. One pair of numbers per token, log pi(y) and log nu(y), is enough for an advantage or an estimate; the
divergences take the whole vocabulary, or its likeliest tokens and all others together as one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mrl.algos.rows import apply_mask, at_least_float32


def divergence(log_probs: Tensor, teacher_log_probs: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return each outcome's part d_v of the divergence, and g_v, its derivative by log pi_v where no other pi changes.

    beta 0 is the forward KL(nu || pi), 1 the reverse KL(pi || nu), and between them the generalized Jensen-Shannon
    divergence beta KL(nu || m) + (1 - beta) KL(pi || m) with m = beta nu + (1 - beta) pi. The gradient of a logit
    is g_v - pi_v sum(g).
    """
    if beta == 0:
        teacher = teacher_log_probs.exp()
        return teacher * (teacher_log_probs - log_probs), -teacher
    if beta == 1:
        probs = log_probs.exp()
        parts = probs * (log_probs - teacher_log_probs)
        return parts, parts + probs
    mixed = torch.logaddexp(teacher_log_probs + math.log(beta), log_probs + math.log1p(-beta))
    own = (1 - beta) * log_probs.exp() * (log_probs - mixed)
    return own + beta * teacher_log_probs.exp() * (teacher_log_probs - mixed), own


def distilled_advantages(
    advantages_T: Tensor, log_probs_T: Tensor, teacher_log_probs_T: Tensor, mask_T: Tensor, coef: float
) -> Tensor:
    """A_t - coef (log pi(y_t) - log nu(y_t)): k1 of the reverse KL as what a token earns, without a gradient.

    Its expected policy gradient is that of the KL at each place alone: a token does not pay for those behind it.
    """
    log_ratio_T = apply_mask(log_probs_T, mask_T) - apply_mask(teacher_log_probs_T, mask_T)
    return at_least_float32(advantages_T) - coef * log_ratio_T.detach()
