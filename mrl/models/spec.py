"""Sizes and switches of one model, and the cost of a token."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass

from mrl.errors import ModelError
from mrl.models.rope import Rope

_CHUNK = 64
"""Tokens that the kernels of the gated delta rule compute together."""


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
    shared_gate: bool = False  # whether a number of each token weights the output of that expert
    num_groups: int = 1  # a token's experts come from its best groups only
    groups_per_token: int = 1
    clamp: float | None = None
    """Limit of an expert's gate and up. Such experts multiply quick_gelu(gate) by up + 1, and they and the router have
    biases. None: silu(gate) times up, without limits and biases."""


@dataclass(frozen=True)
class MlaSpec:
    """Multi-latent attention: the sizes of its latents, and of the parts of its heads."""

    q_rank: int | None  # None: queries come from the hidden states
    kv_rank: int
    nope_dim: int  # dimensions of a query or key without a position
    rope_dim: int  # dimensions with a position, which the keys of all heads share
    v_dim: int


@dataclass(frozen=True)
class GdnSpec:
    """The gated delta rule, a linear attention: sizes of its heads and of the convolution in front of them."""

    key_heads: int
    value_heads: int  # a multiple of the key heads
    key_dim: int
    value_dim: int
    kernel: int  # tokens that the convolution sees
    layers: frozenset[int]  # the other layers have ordinary attention
    interleaved: bool = False  # whether the files store the projections by key head

    @property
    def conv_rows(self) -> int:
        """Rows of queries, keys and values, which the convolution changes."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state_elements(self) -> int:
        """Elements of the matrices of all heads of a layer."""
        return self.value_heads * self.key_dim * self.value_dim

    @property
    def products_per_token(self) -> int:
        """Multiplications of a token, without the projections: with the other tokens of its chunk, whose triangular
        system is half filled, three times with the matrices, and in the convolution."""
        in_chunk = _CHUNK * (2 * self.key_dim + self.value_dim) + _CHUNK // 2 * (self.key_dim + self.value_dim)
        return 3 * self.state_elements + self.value_heads * in_chunk + self.kernel * self.conv_rows

    def state_bytes(self, tp: int, item: int) -> int:
        """Return the bytes that an engine keeps on a rank per sequence, of any length: the matrices in float32, and the
        last tokens before the convolutions in items of that size."""
        return len(self.layers) * (4 * self.state_elements + (self.kernel - 1) * self.conv_rows * item) // tp


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
    layers_without_window: frozenset[int] = frozenset()
    sinks: bool = False  # one learned logit per head takes part in the softmax of attention, and adds nothing to it
    output_bias: bool = False  # of attention's output projection
    mla: MlaSpec | None = None
    moe: MoeSpec | None = None
    gdn: GdnSpec | None = None
    output_gate: bool = False  # whether a gate for each query head multiplies the output of ordinary attention
    zero_centered_norms: bool = False  # whether a norm multiplies by 1 + weight
    layer_prefix: str = "model.layers."  # beginning of the names of layers' tensors, up to the number
    num_predicting_layers: int = 0
    """Number of extra layers in the files that predict more tokens at once. mrl does not train or export them."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_heads} attention heads are not a multiple of {self.num_kv_heads} for keys")
        if (gdn := self.gdn) and (gdn.value_heads % gdn.key_heads or not 0 < len(gdn.layers) < self.num_layers):
            heads = f"{gdn.value_heads} value heads for {gdn.key_heads} key heads"
            raise ModelError(f"linear attention with {heads}, in {len(gdn.layers)} of {self.num_layers} layers")
        moe = self.moe
        if moe is None:
            return
        if moe.experts_per_token > moe.num_experts:
            raise ModelError(f"{moe.experts_per_token} experts per token, but there are only {moe.num_experts}")
        if moe.num_experts % moe.num_groups or moe.groups_per_token > moe.num_groups:
            raise ModelError(f"{moe.groups_per_token} of {moe.num_groups} groups, of {moe.num_experts} experts in all")
        if moe.experts_per_token == 1 and moe.norm_topk:
            raise ModelError("one expert per token with normalized weights gives its router no gradient")
        if len(moe.dense_layers) == self.num_layers:
            raise ModelError(f"experts are described, but none of the {self.num_layers} layers has any")

    def has_experts(self, layer: int) -> bool:
        """Return whether that layer (counted over the whole model, from 0) routes its tokens to experts."""
        return self.moe is not None and layer not in self.moe.dense_layers

    def is_linear(self, layer: int) -> bool:
        """Return whether that layer has the gated delta rule instead of ordinary attention."""
        return self.gdn is not None and layer in self.gdn.layers

    def kind(self, layer: int) -> Hashable:
        """Return the kind of that layer. Layers of the same kind have the same tensors, except for their names."""
        mlp = "experts" if self.has_experts(layer) else "dense"
        return ("linear", mlp) if self.is_linear(layer) else mlp

    def layers_by_kind(self) -> dict[Hashable, list[int]]:
        """Return the layers of each kind. The first layer of a kind is its example."""
        layers: dict[Hashable, list[int]] = defaultdict(list)
        for layer in range(self.num_layers):
            layers[self.kind(layer)].append(layer)
        return dict(layers)

    @property
    def v_dim(self) -> int:
        """Dimensions of a value head."""
        return self.mla.v_dim if self.mla else self.head_dim

    @property
    def qkv_rows(self) -> int:
        """Total rows of queries, keys and values."""
        q_heads = self.num_heads * (2 if self.output_gate else 1)
        return (q_heads + self.num_kv_heads) * self.head_dim + self.num_kv_heads * self.v_dim

    @property
    def num_parameters(self) -> int:
        """Parameters of the language model. Tied embeddings count once. A router's frozen bias is no parameter."""
        small = (self.qkv_rows if self.qkv_bias else 0) + (2 * self.head_dim if self.qk_norm else 0)
        small += (self.num_heads if self.sinks else 0) + (self.hidden if self.output_bias else 0)
        if self.mla:
            small += (self.mla.q_rank or 0) + self.mla.kv_rank
        attention = self._attention_weights + _num_full(self) * small
        if gdn := self.gdn:
            attention += len(gdn.layers) * (gdn.conv_rows * gdn.kernel + 2 * gdn.value_heads + gdn.value_dim)
        norms = 2 * self.num_layers * self.hidden
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        experts = self.moe.num_experts if self.moe else 0
        mlp = self._mlp_weights(experts) + _mlp_biases(self)
        return attention + norms + mlp + embeddings + self.hidden

    @property
    def flops_per_token(self) -> int:
        """Forward FLOPs of one token, including the head but not attention to other tokens: two per active weight, and
        those of linear attention."""
        active_experts = self.moe.experts_per_token if self.moe else 0
        layers = self._attention_weights + self._mlp_weights(active_experts)
        linear = len(self.gdn.layers) * self.gdn.products_per_token if self.gdn else 0
        return 2 * (layers + linear + self.vocab * self.hidden)

    @property
    def mlp_share(self) -> float:
        """Share of the MLPs in `flops_per_token`."""
        return 2 * self._mlp_weights(self.moe.experts_per_token if self.moe else 0) / self.flops_per_token

    @property
    def attention_flops_per_token_pair(self) -> int:
        """Forward FLOPs of one token attending to another. A causal sequence of n tokens has n (n + 1) / 2 such
        pairs."""
        return 2 * _num_full(self) * self.num_heads * (self.head_dim + self.v_dim)

    @property
    def decode_flops_per_token_pair(self) -> int:
        """The same while an engine decodes: with multi-latent attention, each head reads the latents themselves."""
        if self.mla is None:
            return self.attention_flops_per_token_pair
        return 2 * self.num_layers * self.num_heads * (2 * self.mla.kv_rank + self.mla.rope_dim)

    def cached_elements(self, tp: int, stage: range | None = None) -> int:
        """Return the elements that an engine's rank caches per token: keys and values of its heads, or the latents.

        `stage` gives the layers of a pipeline stage, otherwise all count.
        """
        layers = range(self.num_layers) if stage is None else stage
        if self.mla:
            return len(layers) * (self.mla.kv_rank + self.mla.rope_dim)
        # With a window in all layers, the cache is planned as if nothing left it.
        growing = self.layers_without_window or {layer for layer in layers if not self.is_linear(layer)}
        num_layers = len(growing & {*layers})
        return 2 * num_layers * max(1, self.num_kv_heads // tp) * self.head_dim

    def sequence_flops(self, num_tokens: int) -> int:
        """Return the forward FLOPs of one sequence, counting only pairs inside the causal mask and the window."""
        window = min(num_tokens, self.sliding_window or num_tokens)
        pairs = window * (window + 1) // 2 + (num_tokens - window) * window
        unseen = num_tokens * (num_tokens + 1) // 2 - pairs  # pairs outside the window
        more = unseen * len(self.layers_without_window) // self.num_layers
        return self.flops_per_token * num_tokens + self.attention_flops_per_token_pair * (pairs + more)

    @property
    def _attention_weights(self) -> int:
        """Weights of the projections of all layers' attention."""
        weights = _num_full(self) * _full_attention_weights(self)
        if gdn := self.gdn:
            values = gdn.value_heads * gdn.value_dim
            weights += len(gdn.layers) * self.hidden * (gdn.conv_rows + 2 * values + 2 * gdn.value_heads)
        return weights

    def _mlp_weights(self, num_experts: int) -> int:
        """Return the weights of the MLPs of all layers, with that many experts in each layer with experts."""
        num_moe_layers = sum(map(self.has_experts, range(self.num_layers)))
        dense = (self.num_layers - num_moe_layers) * 3 * self.hidden * self.ffn
        if self.moe is None:
            return dense
        expert_layer = 3 * self.hidden * (num_experts * self.moe.expert_ffn + self.moe.shared_ffn)
        expert_layer += (self.moe.num_experts + self.moe.shared_gate) * self.hidden
        return dense + num_moe_layers * expert_layer


def route_bytes(spec: ModelSpec) -> int:
    """Return the bytes of the experts that one token chooses in all layers: a byte per choice among up to 256."""
    if spec.moe is None:
        return 0
    num_choices = spec.moe.experts_per_token * sum(map(spec.has_experts, range(spec.num_layers)))
    return num_choices * (1 if spec.moe.num_experts <= 256 else 2)


def _mlp_biases(spec: ModelSpec) -> int:
    """Return the biases of all experts and routers."""
    moe = spec.moe
    if moe is None or moe.clamp is None:
        return 0
    per_layer = moe.num_experts * (1 + 2 * moe.expert_ffn + spec.hidden)
    return per_layer * sum(map(spec.has_experts, range(spec.num_layers)))


def _num_full(spec: ModelSpec) -> int:
    """Return the number of layers with ordinary attention."""
    return spec.num_layers - (len(spec.gdn.layers) if spec.gdn else 0)


def _full_attention_weights(spec: ModelSpec) -> int:
    mla = spec.mla
    if mla is None:
        return spec.hidden * (spec.qkv_rows + spec.num_heads * spec.head_dim)
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_heads * (mla.nope_dim + mla.v_dim)
    queries = mla.q_rank * (spec.hidden + q_rows) if mla.q_rank else spec.hidden * q_rows
    keys_and_values = spec.hidden * (mla.kv_rank + mla.rope_dim) + mla.kv_rank * kv_rows
    return queries + keys_and_values + spec.num_heads * mla.v_dim * spec.hidden
