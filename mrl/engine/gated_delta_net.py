"""The layer of the gated delta rule in Megatron.

Megatron's own needs the kernels of `fla` to be built at all, and in its earlier versions takes no packed rows. This one
has the same parameters, in the same order of rows.
"""

from __future__ import annotations

import mrl.engine.with_megatron  # noqa: F401

# isort: split
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import silu, softplus

from mrl.engine.delta_rule import gated_delta_rule, row_convolution
from mrl.engine.packed_params import PackedParams
from mrl.errors import EngineError


@dataclass
class GatedDeltaNetSubmodules:
    """The modules of a layer, some of them Transformer Engine's."""

    in_proj: type[Module]
    out_norm: type[Module]
    out_proj: type[Module]


def replace_attention(layer: ModuleSpec, norm: type[Module]) -> None:
    """Give the spec of a layer the gated delta rule, with the linear layers of its attention."""
    linear = layer.submodules.self_attention.submodules
    parts = GatedDeltaNetSubmodules(linear.linear_qkv, norm, linear.linear_proj)
    layer.submodules.self_attention = ModuleSpec(module=GatedDeltaNet, submodules=parts)


class GatedDeltaNet(MegatronModule):  # type: ignore[misc]  # Megatron's class has no type information here
    """Linear attention of the tokens of each row. Tensor ranks hold some key heads, and the value heads of these."""

    def __init__(self, config: TransformerConfig, submodules: GatedDeltaNetSubmodules, **options: Any) -> None:
        super().__init__(config=config)
        group = options["pg_collection"].tp
        tp = group.size()
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self.key_heads, self.value_heads = config.linear_num_key_heads // tp, config.linear_num_value_heads // tp
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        self.sizes = (2 * keys + values, values, self.value_heads, self.value_heads)
        linear = {"config": config, "bias": False, "is_expert": False, "tp_group": group}
        self.in_proj = submodules.in_proj(
            config.hidden_size,
            tp * sum(self.sizes),
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="qkv",
            **linear,
        )
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        where = {"dtype": config.params_dtype, "device": device}
        channels = self.sizes[0]
        self.conv1d = torch.nn.Conv1d(
            channels, channels, config.linear_conv_kernel_dim, groups=channels, bias=False, **where
        )
        self.A_log = torch.nn.Parameter(torch.empty(self.value_heads, **where))
        self.dt_bias = torch.nn.Parameter(torch.empty(self.value_heads, **where))
        norm: Any = submodules.out_norm(config, self.value_dim, eps=config.layernorm_epsilon)
        norm.zero_centered = False
        norm.weight.sequence_parallel = False  # `_gated_norm` sums its gradients
        self.out_norm = norm
        self.out_proj = submodules.out_proj(
            tp * values,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="proj",
            **linear,
        )

    def forward(
        self, hidden_states: Tensor, *_: Any, packed_seq_params: PackedParams, **__: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states [tokens, 1, hidden], with sequence parallelism of some tokens only -> the same shape."""
        if packed_seq_params.segments is None:
            raise EngineError("mrl's gated delta rule supports packed rows only")
        chunks = packed_seq_params.segments.chunks
        projected, _bias = self.in_proj(hidden_states)
        mixed, gate, b, a = projected[:, 0].split(self.sizes, -1)
        q, k, v = self._heads(silu(row_convolution(mixed, self.conv1d.weight, chunks)))
        log_decay = -self.A_log.float().exp() * softplus(a.float() + self.dt_bias.float())
        read = gated_delta_rule((q, k, v), log_decay, b.float().sigmoid(), chunks)
        normalized = self._gated_norm(read.to(mixed.dtype), gate.unflatten(-1, (self.value_heads, -1)))
        projected, bias = self.out_proj(normalized.flatten(1)[:, None])
        return projected, bias

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        keys = self.key_heads * self.key_dim
        q, k, v = torch.split(mixed, [keys, keys, self.value_heads * self.value_dim], -1)
        by_head = (len(mixed), self.key_heads, -1)
        return q.view(by_head), k.view(by_head), v.view(len(mixed), self.value_heads, -1)

    def _gated_norm(self, x: Tensor, gate: Tensor) -> Tensor:
        """Normalize each head, and multiply it by its gate.

        All tensor ranks have the norm's weight, each for its own heads: the backward pass sums the gradients.
        """
        weight = copy_to_tensor_model_parallel_region(self.out_norm.weight)
        normalized = torch.func.functional_call(self.out_norm, {"weight": weight}, (x,))
        gated: Tensor = normalized * silu(gate.float())
        return gated.to(x.dtype)
