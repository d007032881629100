"""Modules of a transformer layer: Transformer Engine's if it is installed, otherwise Megatron's and mrl's.

mrl's modules are a norm for sequence parallelism, and attention over packed rows with grouped queries, which gathers
keys for context parallelism. Megatron's local attention supports none of these. On CUDA it is torch's variable-length
kernel, on the CPU dense blocks of rows of similar length.
"""

from __future__ import annotations

import mrl.engine.with_megatron  # noqa: F401

# isort: split
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from mrl.engine.gated_delta_net import replace_attention
from mrl.engine.latent_attention import LatentAttention, replicate_projections
from mrl.engine.packed_attention import GatherRows, in_blocks, varlen
from mrl.engine.packed_params import PackedParams
from mrl.errors import EngineError
from mrl.libraries import transformer_engine_extension


def has_transformer_engine() -> bool:
    """Return whether layers come from Transformer Engine: its extension is installed, and there is a GPU."""
    return torch.cuda.is_available() and transformer_engine_extension() is not None


class RmsNorm(torch.nn.Module):
    """x / rms(x) * weight, computed in float32 like in transformers. Marks its weight for Megatron's gradient
    reduction. A zero-centered norm multiplies by 1 + weight.

    Megatron's wrapper of torch's norm does not support sequence parallelism, where each tensor rank has a part of the
    tokens and the gradients of the weight must be summed over the ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps, self.zero_centered = eps, config.layernorm_zero_centered_gamma
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # Megatron's mark

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized `x` in its dtype."""
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.zero_centered:
            return (scaled * (1 + self.weight.float())).to(x.dtype)
        return self.weight * scaled.to(x.dtype)


def block_spec(config: TransformerConfig, chunk: int | None) -> TransformerBlockSubmodules | ModuleSpec:
    if not has_transformer_engine() or config.experimental_attention_variant:
        return _block_of_kinds(config, chunk)
    if config.num_moe_experts is None:
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=chunk)
    for layer in block.layer_specs if config.multi_latent_attention else ():
        layer.submodules.self_attention.module = LatentAttention
    return block


def _block_of_kinds(config: TransformerConfig, chunk: int | None) -> TransformerBlockSubmodules:
    """Return a block with one spec for each kind of layer in it."""
    offset = get_transformer_layer_offset(config, vp_stage=chunk)
    numbers = range(offset, offset + get_num_layers_to_build(config, vp_stage=chunk))
    kinds = [(_has_experts(config, number), _is_linear(config, number)) for number in numbers]
    layers = {kind: _layer(config, *kind) for kind in set(kinds)}
    return TransformerBlockSubmodules(layer_specs=[layers[kind] for kind in kinds], layer_norm=_norm())


def _norm() -> type[torch.nn.Module]:
    if not has_transformer_engine():
        return RmsNorm
    from megatron.core.extensions.transformer_engine import TENorm

    norm: type[torch.nn.Module] = TENorm
    return norm


def _layer(config: TransformerConfig, routed: bool, linear: bool) -> ModuleSpec:
    if has_transformer_engine():
        layer = get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts if routed else None,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
        )
    else:
        layer = _local_layer(config, routed)
    if linear:
        replace_attention(layer, RmsNorm)
    return layer


def _is_linear(config: TransformerConfig, layer: int) -> bool:
    return config.experimental_attention_variant == "gated_delta_net" and bool(config.linear_attention_freq[layer])


def _has_experts(config: TransformerConfig, layer: int) -> bool:
    if config.num_moe_experts is None:
        return False
    pattern = config.moe_layer_freq
    return bool(pattern[layer]) if isinstance(pattern, list) else layer % pattern == 0


def _local_layer(config: TransformerConfig, routed: bool) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if routed else None,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
        multi_latent_attention=config.multi_latent_attention,
    )
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RmsNorm
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.multi_latent_attention:
        parts.self_attention.module = LatentAttention
        replicate_projections(attention, RmsNorm)
    elif config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RmsNorm
    return layer


class PackedAttention(MegatronModule):  # type: ignore[misc]  # Megatron's class has no type information here
    """Causal attention of every token to itself and the earlier tokens of its row."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, softmax_scale: float | None = None, **options: Any
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale
        self.context = options["pg_collection"].cp
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.reach = config.window_size[0] if windowed else None  # number of tokens before the current one
        self.softmax_offset: torch.nn.Parameter | None = None  # Megatron's name of the sinks
        if config.softmax_type == "learnable":
            num_heads = config.num_attention_heads // options["pg_collection"].tp.size()
            device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
            self.softmax_offset = torch.nn.Parameter(torch.empty(num_heads, dtype=config.params_dtype, device=device))

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: PackedParams, **__: Any
    ) -> Tensor:
        """Query and key [tokens, heads or groups, dim], value [tokens, groups, v_dim] -> [tokens, heads * v_dim]."""
        segments = packed_seq_params.segments
        if segments is None:
            raise EngineError("mrl's core attention supports packed rows only")
        if segments.key_order is not None:
            key = GatherRows.apply(key, segments.key_order, self.context)  # type: ignore[no-untyped-call]
            value = GatherRows.apply(value, segments.key_order, self.context)  # type: ignore[no-untyped-call]
        attend, width = varlen if query.is_cuda else in_blocks, value.shape[-1]
        # Kernels that keep no [tokens, tokens] matrix need values as wide as keys.
        value = torch.nn.functional.pad(value, (0, key.shape[-1] - width))
        if self.softmax_offset is not None:
            attended = in_blocks((query, key, value), segments, self.scale, self.reach, self.softmax_offset)
        else:
            attended = attend((query, key, value), segments, self.scale, self.reach)
        return attended[..., :width].reshape(query.shape[0], -1)
