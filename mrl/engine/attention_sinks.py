"""Sinks: one learned logit per head takes part in the softmax of attention, and adds nothing to the output.

A kernel for plain attention computes this if queries and keys are one dimension wider: there each query has its head's
logit, one more key has a one, and all other keys have a zero.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad


def with_logits(query: Tensor, sinks: Tensor, scale: float | None) -> tuple[Tensor, float]:
    """Return queries [tokens, heads, dim] with the logits of their heads, and the scale of the softmax."""
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    logits = (sinks.float() / scale).to(query.dtype)
    return torch.cat([query, logits[None, :, None].expand(len(query), -1, 1)], -1), scale


def with_sink(key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys and values [rows, keys, groups, dim] with the sink at the end, and the mask in which all see it.

    Values are padded to the width of the keys.
    """
    if mask is None:  # causal, with as many queries as keys
        size = key.shape[1]
        mask = torch.ones(1, size, size, dtype=torch.bool, device=key.device).tril()
    sink = pad(torch.zeros_like(key[:, :1]), (0, 1))
    sink[..., -1] = 1
    key = torch.cat([pad(key, (0, 1)), sink], 1)
    return key, pad(value, (0, 1, 0, 0, 0, 1)), pad(mask, (0, 1), value=True)
