"""Attention over packed rows: torch's variable-length kernel on CUDA, and dense blocks of rows of similar length."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mrl.engine import attention_sinks
from mrl.engine.segments import Lengths, Segments

Qkv = tuple[Tensor, Tensor, Tensor]
"""Queries [tokens, heads, dim], and keys and values [tokens, groups, dim]."""


class GatherRows(torch.autograd.Function):
    """All context ranks' tokens in row order. Backward sums all ranks' gradients for this rank's tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
        ctx.order, ctx.group = order, group
        gathered = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
        torch.distributed.all_gather_into_tensor(gathered, x.contiguous(), group=group)
        return gathered[order]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        by_rank = torch.empty_like(grad)
        by_rank[ctx.order] = grad
        local = grad.new_empty(grad.shape[0] // ctx.group.size(), *grad.shape[1:])
        torch.distributed.reduce_scatter_tensor(local, by_rank, group=ctx.group)
        return local, None, None


def in_blocks(
    qkv: Qkv, segments: Segments, scale: float | None, reach: int | None, sinks: Tensor | None = None
) -> Tensor:
    query, key, value = qkv
    if sinks is not None:
        query, scale = attention_sinks.with_logits(query, sinks, scale)
    blocks, places = segments.blocks(reach)
    results = []
    for block in blocks:
        q, k, v = query[block.query_BS], key[block.key_BS], value[block.key_BS]
        mask = block.mask_BSS
        if sinks is not None:
            k, v, mask = attention_sinks.with_sink(k, v, mask)
        mask = None if mask is None else mask[:, None]
        attended = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        results.append(attended.transpose(1, 2).flatten(0, 1)[block.kept])
    return torch.cat(results)[places]


def varlen(qkv: Qkv, segments: Segments, scale: float | None, reach: int | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = qkv
    if segments.key_order is not None:  # segments of one row share keys: copy them for each
        key_index = torch.cat(
            [
                torch.arange(start, start + length, device=key.device)
                for start, length in zip(segments.key_starts.tolist(), segments.key_lengths.tolist(), strict=True)
            ]
        )
        key, value = key[key_index], value[key_index]
    options: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1]}
    attended = varlen_attn(
        query,
        key,
        value,
        _ends(segments.query_lengths, query.device),
        _ends(segments.key_lengths, query.device),
        int(segments.query_lengths.max()),
        int(segments.key_lengths.max()),
        scale=scale,
        window_size=(-1 if reach is None else reach, 0),
        **(options if _takes_enable_gqa(varlen_attn) else {}),
    )
    assert isinstance(attended, Tensor), "the kernel returns one tensor by default"
    return attended


@functools.cache
def _takes_enable_gqa(kernel: Callable[..., Any]) -> bool:
    """Return whether the kernel has an option for grouped queries. Up to torch 2.11 it detects them."""
    return "enable_gqa" in inspect.signature(kernel).parameters


def _ends(lengths: Lengths, device: torch.device) -> Tensor:
    return torch.from_numpy(np.append(0, np.cumsum(lengths)).astype(np.int32)).to(device)
