"""Attention over packed rows for the models of transformers, registered as a separate attention implementation.

A mask over the tokens of a micro-batch is never made: the segments say which keys a query sees. Because of that, a
window or a chunk that a model puts only into its mask would be lost. While `looks_at_masks` is set in a model's
configuration, its layers get marks instead of masks, and each layer's window is compared with its mark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mrl.engine.packed_attention import GatherRows, in_blocks, varlen
from mrl.engine.segments import Segments
from mrl.errors import ModelError

NAME = "mrl_packed"
_FAR = 1 << 24
"""More tokens than any window or chunk has."""
_COMPUTED = {"scaling", "sliding_window", "softcap", "s_aux"}
_KNOWN = _COMPUTED | {"dropout", "is_causal", "position_ids", "use_cache"}
"""Options of attention that are computed here, are checked, or change nothing."""


@dataclass
class PackedRows:
    """The current micro-batch, for the attention of all layers."""

    context: dist.ProcessGroup
    segments: Segments | None = None


def packed_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
) -> tuple[Tensor, None]:
    """Queries [1, heads, tokens, dim], keys and values [1, groups, tokens, dim] -> [1, tokens, heads, dim]."""
    rows: PackedRows = module.packed_rows  # type: ignore[assignment]
    segments = rows.segments
    assert segments is not None, "a micro-batch was announced"
    _check_options(module, options)
    scaling, window, softcap, sinks = (options.get(name) for name in ("scaling", "sliding_window", "softcap", "s_aux"))
    if attention_mask is not None:
        _check_mask(module, attention_mask, window)
    reach = None if window is None else window - 1
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    if segments.key_order is not None:
        key = GatherRows.apply(key, segments.key_order, rows.context)  # type: ignore[no-untyped-call]
        value = GatherRows.apply(value, segments.key_order, rows.context)  # type: ignore[no-untyped-call]
    width = value.shape[-1]
    # Kernels that keep no [tokens, tokens] matrix need values as wide as keys.
    value = pad(value, (0, key.shape[-1] - width)) if width < key.shape[-1] else value
    if softcap is not None:
        attended = _capped((query, key, value), segments, scaling, reach, softcap)
    elif sinks is not None or not query.is_cuda or query.dtype == torch.float32 or width > key.shape[-1]:
        attended = in_blocks((query, key, value), segments, scaling, reach, sinks)
    else:
        attended = varlen((query, key, value), segments, scaling, reach)
    return attended[None, ..., :width], None


def _check_options(module: torch.nn.Module, options: Mapping[str, Any]) -> None:
    """Raise an error if a layer asks for something that this attention does not compute."""
    name = type(module).__name__
    if options.get("dropout"):
        raise ModelError(f"{name} has dropout {options['dropout']} in attention: mrl trains without dropout")
    if options.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise ModelError(f"{name} has attention to later tokens")
    if unknown := {option for option, value in options.items() if value is not None} - _KNOWN:
        raise ModelError(f"{name} calls its attention with {', '.join(sorted(unknown))}, which mrl does not know")


def _capped(
    qkv: tuple[Tensor, Tensor, Tensor], segments: Segments, scale: float | None, reach: int | None, cap: float
) -> Tensor:
    """Compute attention whose scores are cap * tanh(score / cap)."""
    query, key, value = qkv
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    blocks, places = segments.blocks(reach)
    results = []
    for block in blocks:
        q, k, v = query[block.query_BS], key[block.key_BS], value[block.key_BS]
        repeats = q.shape[2] // k.shape[2]
        k, v = (x.repeat_interleave(repeats, 2) for x in (k, v))
        scores = cap * torch.tanh(torch.einsum("bqhd,bkhd->bhqk", q, k) * (scale / cap))
        seen = block.mask_BSS
        if seen is None:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()[None]
        weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1, dtype=torch.float32).to(v.dtype)
        results.append(torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(0, 1)[block.kept])
    return torch.cat(results)[places]


@dataclass(frozen=True)
class MaskMark:
    """Stand-in for a mask that lets a query see `window` tokens, all before it if None, or something else if 0."""

    window: int | None


def _no_mask(*_: Any, mask_function: Callable[..., Any], config: Any = None, **__: Any) -> MaskMark | None:
    """Make no mask; a mark while a model is looked at."""
    return MaskMark(_reach_of(mask_function)) if getattr(config, "looks_at_masks", False) else None


def _check_mask(module: torch.nn.Module, mask: Any, window: int | None) -> None:
    """Raise an error if a mask hides more, or less, than the options of the attention function say."""
    name = type(module).__name__
    if not isinstance(mask, MaskMark):
        raise ModelError(f"{name} makes a mask without transformers, or changes its mask")
    if mask.window == 0:
        raise ModelError(f"the attention of {name} is not causal and not in a sliding window: for example in chunks")
    if mask.window != window:
        raise ModelError(
            f"{name} has a window of {mask.window} tokens in its mask, but {window} as the option of its attention"
        )


def _reach_of(mask_function: Callable[..., Any]) -> int | None:
    """Return the window of a mask, None if a query sees all tokens before it, and 0 if the mask is none of both."""

    def sees(query: int, key: int) -> bool:
        at = [torch.tensor(number) for number in (0, 0, query, key)]
        return bool(mask_function(*at))

    if sees(_FAR, 0):
        return None
    low, high = 0, _FAR  # sees at a distance of `low`, does not at `high`
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if sees(_FAR, _FAR - middle) else (low, middle)
    # A window ends at the same distance for every query.
    same = all(
        sees(query, query - low) and not sees(query, query - high) for query in range(high, 3 * high, max(1, high // 7))
    )
    return high if same else 0


ALL_ATTENTION_FUNCTIONS.register(NAME, packed_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _no_mask)
