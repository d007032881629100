"""Sizes and switches of one model: Megatron's arguments for it, and the cost of a token.

torch is loaded only when Megatron's arguments or the frequencies are requested, so that planning needs no torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from mrl.errors import ModelError
from mrl.models.rope import Rope


@dataclass(frozen=True)
class MoeSpec:
    """The experts of a model, and their router."""

    num_experts: int
    experts_per_token: int
    expert_ffn: int
    norm_topk: bool
    aux_loss_coef: float
    dense_layers: frozenset[int] = frozenset()  # layers with an ordinary MLP instead
    scoring: str = "softmax"
    correction_bias: bool = False  # a frozen bias, added to the scores that choose experts but not to their weights
    scaling: float = 1.0  # factor of the weights of the chosen experts
    shared_ffn: int = 0  # rows of the expert that every token uses, or 0


@dataclass(frozen=True)
class ModelSpec:
    """One model of a family, as described by its `config.json`."""

    family: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    norm_eps: float
    tied: bool
    rope: Rope
    max_positions: int
    dtype: str | None  # None if `config.json` does not give it
    qkv_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    moe: MoeSpec | None = None
    num_predicting_layers: int = 0
    """Number of extra layers in the files that predict more tokens at once. mrl does not train or export them."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_heads} attention heads are not a multiple of {self.num_kv_heads} for keys")
        moe = self.moe
        if moe is None:
            return
        if moe.experts_per_token > moe.num_experts:
            raise ModelError(f"{moe.experts_per_token} experts per token, but there are only {moe.num_experts}")
        if moe.experts_per_token == 1 and moe.norm_topk:
            raise ModelError("one expert per token with normalized weights gives its router no gradient")
        if len(moe.dense_layers) == self.num_layers:
            raise ModelError(f"experts are described, but none of the {self.num_layers} layers has any")

    def has_experts(self, layer: int) -> bool:
        """Return whether that layer (counted over the whole model, from 0) routes its tokens to experts."""
        return self.moe is not None and layer not in self.moe.dense_layers

    def kind(self, layer: int) -> Hashable:
        """Return the kind of that layer. Layers of the same kind have the same tensors, except for their names."""
        return "experts" if self.has_experts(layer) else "dense"

    def layers_by_kind(self) -> dict[Hashable, list[int]]:
        """Return the layers of each kind. The first layer of a kind is its example."""
        layers: dict[Hashable, list[int]] = defaultdict(list)
        for layer in range(self.num_layers):
            layers[self.kind(layer)].append(layer)
        return dict(layers)

    @property
    def qkv_rows(self) -> int:
        """Total rows of queries, keys and values."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    # --- what Megatron is built with --------------------------------------------------------------------------

    def transformer_config(self) -> dict[str, Any]:
        """Return the arguments of Megatron's `TransformerConfig` that describe the model. The engine adds how it
        runs."""
        from torch.nn.functional import silu

        return {
            "num_layers": self.num_layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.num_heads,
            "num_query_groups": self.num_kv_heads,
            "kv_channels": self.head_dim,
            "ffn_hidden_size": self.ffn,
            "layernorm_epsilon": self.norm_eps,
            "normalization": "RMSNorm",
            "gated_linear_unit": True,
            "activation_func": silu,
            "add_bias_linear": False,
            "add_qkv_bias": self.qkv_bias,
            "qk_layernorm": self.qk_norm,
            # Megatron counts the tokens before the current one, transformers includes the current one.
            "window_size": (self.sliding_window - 1, 0) if self.sliding_window else None,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            **self._moe_config(),
        }

    def _moe_config(self) -> dict[str, Any]:
        moe = self.moe
        if moe is None:
            return {}
        return _router_with_bias(moe) | {
            "num_moe_experts": moe.num_experts,
            "moe_router_topk": moe.experts_per_token,
            "moe_ffn_hidden_size": moe.expert_ffn,
            "moe_layer_freq": [int(self.has_experts(layer)) for layer in range(self.num_layers)],
            "moe_router_score_function": moe.scoring,
            # A softmax over the chosen logits equals the normalized full softmax over them.
            "moe_router_pre_softmax": not moe.norm_topk,
            "moe_router_topk_scaling_factor": moe.scaling if moe.scaling != 1 else None,
            "moe_router_dtype": "fp32",
            "moe_shared_expert_intermediate_size": moe.shared_ffn or None,
            # The loss is only the algorithm's. `aux_loss_coef` is available for a balancing term.
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
        }

    def fused_kernels(self) -> dict[str, bool]:
        """Return the arguments of `TransformerConfig` that fuse kernels, including all experts of a layer.

        Transformer Engine has these kernels on GPUs. Engines and plans use them unless the user sets something else.
        """
        names = ["apply_rope_fusion", "bias_activation_fusion", "gradient_accumulation_fusion"]
        if self.moe is not None:
            names += ["moe_grouped_gemm", "moe_permute_fusion"]
        return dict.fromkeys(names, True)

    def gpt_model_arguments(self) -> dict[str, Any]:
        """Return the arguments of Megatron's `GPTModel` that describe the model. The layout pads the vocabulary.

        Megatron's own scaling for Llama 3 fixes three of its four numbers, so it stays off. The code that builds the
        model sets the rotary module's `inv_freq` to `rope.inverse_frequencies()`.
        """
        return {
            "position_embedding_type": "rope",
            "rotary_base": self.rope.theta,
            "rotary_percent": self.rope.dim / self.head_dim,
            "rope_scaling": False,
            "share_embeddings_and_output_weights": self.tied,
            "max_sequence_length": self.max_positions,
        }

    # --- what it costs ----------------------------------------------------------------------------------------

    @property
    def num_parameters(self) -> int:
        """Parameters of the language model. Tied embeddings count once. A router's frozen bias is no parameter."""
        attention = self._attention_weights + (self.qkv_rows if self.qkv_bias else 0)
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        experts = self.moe.num_experts if self.moe else 0
        return self.num_layers * (attention + norms) + self._mlp_weights(experts) + embeddings + self.hidden

    @property
    def flops_per_token(self) -> int:
        """Forward FLOPs of one token, including the head but not attention to other tokens: two per active weight."""
        active_experts = self.moe.experts_per_token if self.moe else 0
        layers = self.num_layers * self._attention_weights + self._mlp_weights(active_experts)
        return 2 * (layers + self.vocab * self.hidden)

    @property
    def mlp_share(self) -> float:
        """Share of the MLPs in `flops_per_token`."""
        return 2 * self._mlp_weights(self.moe.experts_per_token if self.moe else 0) / self.flops_per_token

    @property
    def attention_flops_per_token_pair(self) -> int:
        """Forward FLOPs of one token attending to another. A causal sequence of n tokens has n (n + 1) / 2 such
        pairs."""
        return 4 * self.num_layers * self.num_heads * self.head_dim

    def sequence_flops(self, num_tokens: int) -> int:
        """Return the forward FLOPs of one sequence, counting only pairs inside the causal mask and the window."""
        window = min(num_tokens, self.sliding_window or num_tokens)
        pairs = window * (window + 1) // 2 + (num_tokens - window) * window
        return self.flops_per_token * num_tokens + self.attention_flops_per_token_pair * pairs

    @property
    def _attention_weights(self) -> int:
        return self.hidden * (self.qkv_rows + self.num_heads * self.head_dim)

    def _mlp_weights(self, num_experts: int) -> int:
        """Return the weights of the MLPs of all layers, with that many experts in each layer with experts."""
        num_moe_layers = sum(map(self.has_experts, range(self.num_layers)))
        dense = (self.num_layers - num_moe_layers) * 3 * self.hidden * self.ffn
        if self.moe is None:
            return dense
        expert_layer = 3 * self.hidden * (num_experts * self.moe.expert_ffn + self.moe.shared_ffn)
        expert_layer += self.moe.num_experts * self.hidden
        return dense + num_moe_layers * expert_layer


def _router_with_bias(moe: MoeSpec) -> dict[str, Any]:
    """Return Megatron's arguments of a correction bias. Megatron's update of the bias is off."""
    if not moe.correction_bias:
        return {}
    return {"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.0}
