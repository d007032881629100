"""Multi-latent attention in Megatron: what its local layers need to give the right gradients, and its rotary embedding.

Megatron's local layers split the projections to the latents over tensor ranks, which gives wrong gradients for every
layer below. Here each rank holds them whole, as with Transformer Engine.
"""

from __future__ import annotations

import mrl.engine.with_megatron  # noqa: F401

# isort: split
from typing import Any

import torch
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Module


class ReplicatedLinear(Module):
    """A product without a bias, whose weight every tensor rank holds whole.

    With sequence parallelism each rank multiplies its own tokens, so Megatron must sum the weight's gradients over the
    ranks.
    """

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **_: Any) -> None:
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # Megatron's mark

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return torch.nn.functional.linear(x, self.weight), None


class LatentAttention(MLASelfAttention):  # type: ignore[misc]  # Megatron's class has no type information here
    """Has the modules that its spec names.

    Megatron 0.19 would change them: queries without a latent would get a second norm of the hidden states.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}


def replicate_projections(attention: Any, norm: type[Module]) -> None:
    """Give the local spec of an attention the replicated projections, and this norm after them.

    Megatron takes only a class that it knows as Transformer Engine's for replicated, and Transformer Engine is not
    installed.
    """
    multi_latent_attention.TELinear = ReplicatedLinear
    attention.linear_q_down_proj = attention.linear_kv_down_proj = ReplicatedLinear
    attention.q_layernorm = attention.kv_layernorm = norm


def set_frequencies(decoder: TransformerBlock, frequencies: Tensor) -> None:
    """Make all layers use one rotary embedding with these frequencies, so that its cosines exist once."""
    shared = decoder.layers[0].self_attention.rotary_pos_emb
    shared.inv_freq = frequencies
    for layer in decoder.layers:
        layer.self_attention.rotary_pos_emb = shared
