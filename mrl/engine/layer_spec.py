"""What a transformer layer is made of: Transformer Engine's modules where it is installed, else Megatron's and ours."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from mrl.engine.core_attention import PackedAttention


def has_transformer_engine() -> bool:
    """Return whether layers come from Transformer Engine: it is installed, and there is a GPU for it."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


class RmsNorm(torch.nn.Module):
    """x / rms(x) * weight, in float32 inside, as transformers computes it; its weight tells Megatron how to reduce.

    Megatron's wrapper of torch's norm refuses sequence parallelism, where each tensor rank sees a part of the
    tokens and the weight's gradients must be added up over them.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # Megatron's mark

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized `x`, in its own dtype."""
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(x.dtype)


def block_spec(config: TransformerConfig, chunk: int | None) -> TransformerBlockSubmodules | ModuleSpec:
    """Return the layers of one pipeline chunk."""
    if has_transformer_engine():
        if config.num_moe_experts is None:
            return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=chunk)
    offset = get_transformer_layer_offset(config, vp_stage=chunk)
    numbers = range(offset, offset + get_num_layers_to_build(config, vp_stage=chunk))
    layers = {routed: _local_layer(config, routed) for routed in {_has_experts(config, number) for number in numbers}}
    specs = [layers[_has_experts(config, number)] for number in numbers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=RmsNorm)


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
    )
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RmsNorm
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RmsNorm
    return layer
