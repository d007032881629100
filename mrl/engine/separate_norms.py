"""Layers of Transformer Engine with a separate norm, for adapters.

Transformer Engine fuses the norm in front of a linear layer into that layer. An adapter must read the normalized input,
which then exists only inside the layer. With a separate norm, the linear layer's input is the adapter's.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from mrl.errors import EngineError

_FUSED = "TELayerNormColumnParallelLinear"


def separate_norms(spec: Any) -> None:
    """Replace the fused layers in a spec of one layer, or of a block of layers, by a norm and a linear layer."""
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm

    for layer in getattr(spec, "layer_specs", [spec]):
        parts = layer.submodules
        # The modules of an MLP are arguments of a function since Megatron 0.19.
        attention, mlp = (
            part.keywords["submodules"] if isinstance(part, partial) else getattr(part, "submodules", None)
            for part in (parts.self_attention, parts.mlp)
        )
        for owner, name, norm in (
            (attention, "linear_qkv", "input_layernorm"),
            (attention, "in_proj", "input_layernorm"),
            (mlp, "linear_fc1", "pre_mlp_layernorm"),
        ):
            if getattr(getattr(owner, name, None), "__name__", "") == _FUSED:
                setattr(owner, name, TEColumnParallelLinear)
                setattr(parts, norm, TENorm)


def check_separate_norms(model: Any) -> None:
    """Raise an error if an adapted layer still holds a norm inside."""
    for name, module in model.named_modules():
        if hasattr(module, "lora_a") and hasattr(module, "layer_norm_weight"):
            raise EngineError(f"{name} holds a norm inside: its adapter would read the input before the norm")
