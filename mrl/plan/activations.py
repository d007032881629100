"""Bytes that a training step keeps for backward, from the shapes of a layer's tensors.

Rows are packed and attention is a flash kernel, so no tensor has tokens x tokens. Per token and layer, in elements of
the model's dtype unless noted:

    T    tokens of a micro-batch on one device (`max_tokens_per_device`)
    h    hidden size            q, k   columns of all query heads, of all key heads; d of one head
    l, m sizes of the latents   v      columns of all value heads
    f    columns of the MLP     g      columns of an expert; r of the shared expert
    e    experts per token      E      experts
    t    tensor parallel size   s      t with sequence parallelism, else 1

    attention   2h/s        the norm's input (the residual) and output, the input of queries, keys and values
                (q + 2k)/t  queries, keys and values as inputs of attention
                (q + k)/t   queries and keys before their norms, if they have norms
                4d          cosines and sines of queries and of keys, unless Megatron fuses them (`apply_rope_fusion`);
                            of the rotated dimensions only
                q/t         attention's output, the projection's input; 4 bytes per head for its logsumexp
    latent      2h/s        as above
                2(l + m)/s  the latents of queries and of keys and values, before and after their norms
                4q/t        queries, keys, values padded to the width of keys, and the kernel's output
                v/t         the output without the padding, if values are narrower
                4d          as above, of the dimensions with a position
    MLP         2h/s        the norm's input and output
                5f/t        gate and up, silu(gate), up again, their product; 3f/t with `bias_activation_fusion`
    experts     2h/s        the norm's input and output;  24e + 5E bytes (/s) for the router,
                            4E + 4 more with a sigmoid
                e(h etp + 6g)/s  tokens dispatched; gate and up, silu(gate), up again, their product before and
                            after its weight, 3g with the fusion. The busiest rank's tokens count
                5r/t        of the shared expert, like an MLP's; 3r/t with the fusion

Norms are Transformer Engine's. Other norms keep 4 bytes more per element, their input in float32. A test measures
what autograd saves in a running engine and compares it with these numbers.

Full recomputation keeps h/s per layer (per `recompute_num_layers` with `uniform`), and needs all tensors of a group of
layers while it recomputes the group. `block` recomputes only the first layers of each chunk. Selective recomputation
drops what the named modules recompute: `mlp` and `moe` everything except their norm's input and output (on GPUs a dense
MLP's norm is part of its first product, so its output is dropped too), `layernorm` the outputs of norms, `moe_act` silu
and products, `mla_up_proj` the queries and keys from latents; `core_attn` recomputes tensors that a flash kernel does
not keep anyway.

While backward is in a layer, it also needs the recomputed tensors, the gradients of the MLP (2f/t with the fusion,
else 3f/t; of the experts the same with eg/s, or e(h etp + g)/s if that is more), and the gradients of the layer's
input and output (2h). With sequence parallelism these two gradients and the input are gathered (3h together).

Tokens on their way to experts and back exist several times during the forward pass: eh/s sorted for sending, eh/s
received, and then of what the experts see, e h etp/s: their inputs (kept above), their outputs, and the outputs in
the order of arrival. A rank with one expert sorts nothing: what it receives are the inputs, and the outputs return as
they are (eh/s). With `etp`, the outputs of its ranks are summed in float32. Backward needs these, or the
gradients of the experts if they are larger. A forward pass without backward does not have the experts' inner tensors
(3g with the fusion) any more when their outputs return.

A pipeline stage keeps the micro-batches between their forward and their backward: `pp - stage` of them,
or with `vpp` chunks `2 (pp - stage - 1) + (vpp - 1) pp + 1` chunks of `layers / (pp vpp)` layers. Of each it also keeps
the tensor that it has sent to the next stage (h/s).

The head finishes before backward enters a layer, so only the larger of the two counts. It processes the vocabulary in
tiles. It keeps the hidden states of the scored tokens (h), their gradient in float32 and in the model's dtype, the
gradient of its weight, and three tiles at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from mrl.config.schema import MegatronModelConfig
from mrl.dtypes import ITEM_BYTES
from mrl.models.layout import layers_of_chunk
from mrl.models.parameters import padded_vocab
from mrl.models.spec import MlaSpec, ModelSpec
from mrl.models.table import Head
from mrl.plan.assumptions import ASSUMPTIONS
from mrl.plan.delta_activations import delta_bytes, delta_forward_bytes, delta_work_bytes

TILE_BYTES, MIN_COLUMNS = {"cpu": 1 << 24, "gpu": 1 << 28}, 512  # a test compares them with the head's own
_TILES_AT_ONCE = 3


@dataclass(frozen=True)
class LayerActivations:
    """Bytes per token that one layer keeps for backward, grouped by the recomputation that would drop them."""

    residual: float
    """The layer's input, the only tensor that full recomputation keeps."""
    norms: float
    attention: float
    up_projected: float
    """Queries and keys that come from latents. Recomputing `mla_up_proj` drops them."""
    mlp_input: float
    """The norm's input before the MLP. Recomputing only the MLP keeps this and the norm's output."""
    mlp: float
    expert_activation: float

    @property
    def total(self) -> float:
        return float(sum(vars(self).values()))


@dataclass(frozen=True)
class StageActivations:
    """Bytes for the layers of a pipeline stage."""

    kept: int
    """Bytes kept for backward, of all running micro-batches."""
    at_work: int
    """Bytes while backward is in a layer: recomputed tensors, gradients, and gathered sequences."""


def layer_bytes(
    spec: ModelSpec, model: MegatronModelConfig, has_experts: bool, is_linear: bool = False
) -> LayerActivations:
    """Return the bytes that one layer keeps per token of a device."""
    at, item = model.parallel, ITEM_BYTES[model.dtype]
    t, s = at.tp, at.tp if at.sequence_parallel else 1
    fused = bool(model.megatron.get("bias_activation_fusion"))
    hidden = item * spec.hidden / s
    if spec.gdn and is_linear:
        attention, up_projected = delta_bytes(spec.gdn, t, item), 0.0
    else:
        elements = _latent_elements(spec, spec.mla, t, s) if spec.mla else _grouped_elements(spec, t)
        attention = item * elements + 4 * spec.num_heads / t
        up_projected = item * 2 * spec.num_heads * spec.head_dim / t if spec.mla else 0.0
        attention += 0 if model.megatron.get("apply_rope_fusion") else 4 * spec.rope.dim * item
    if not (has_experts and spec.moe):
        mlp, activation = item * (3 if fused else 5) * spec.ffn / t, 0.0
    else:
        moe = spec.moe
        # A rank sees the tokens of all ranks that share its experts, but holds proportionally fewer experts.
        seen = item * _expert_tokens(spec, model).seen
        router = 24 * moe.experts_per_token + 5 * moe.num_experts
        router += 4 * moe.num_experts + 4 if moe.scoring == "sigmoid" else 0
        shared = item * (3 if fused else 5) * moe.shared_ffn / t
        shared += item * (spec.hidden + 1) / s if moe.shared_gate else 0
        mlp = seen * (spec.hidden + 2 * moe.expert_ffn / at.etp) + router / s + shared
        activation = seen * (1 if fused else 4) * moe.expert_ffn / at.etp
    return LayerActivations(hidden, 2 * hidden, attention, up_projected, hidden, mlp, activation)


def _grouped_elements(spec: ModelSpec, t: int) -> float:
    q, k = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    k = max(k, t * spec.head_dim)  # with fewer heads than ranks, each rank has one
    gate = 3 * q if spec.output_gate else 0  # in float32, in the kernel's own dtype, and after it
    return (2 * q + 2 * k + (q + k if spec.qk_norm else 0) + gate) / t


def _latent_elements(spec: ModelSpec, mla: MlaSpec, t: int, s: int) -> float:
    q, v = spec.num_heads * spec.head_dim, spec.num_heads * mla.v_dim
    latents = 2 * ((mla.q_rank or 0) + mla.kv_rank) / s
    return latents + (2 * q + (v if mla.v_dim < spec.head_dim else 0)) / t


def stage_activations(
    spec: ModelSpec,
    model: MegatronModelConfig,
    stage: int,
    num_micro_batches: int,
    device: Literal["cpu", "gpu"] = "gpu",
) -> StageActivations:
    """Return the peak bytes kept by the layers of a pipeline stage, and the bytes needed while they work."""
    layout, tokens = model.parallel, model.max_tokens_per_device
    pp, vpp = layout.pp, layout.vpp
    chunks = [layers_of_chunk(layout, spec.num_layers, stage, chunk) for chunk in range(vpp)]
    kept, working = 0.0, 0.0
    for layers in chunks:
        kinds = [(spec.has_experts(layer), spec.is_linear(layer)) for layer in layers]
        bytes_of = {kind: layer_bytes(spec, model, *kind) for kind in set(kinds)}
        per_layer = [bytes_of[kind] for kind in kinds]
        fused_norm = device == "gpu"
        chunk_kept, again = _with_recomputation(per_layer, model.megatron, fused_norm)
        gradients = max((_mlp_gradient_bytes(spec, model, has_experts) for has_experts, _ in bytes_of), default=0.0)
        kept, working = kept + chunk_kept / vpp, max(working, again + gradients)
        linear = [layer for (_, is_linear), layer in bytes_of.items() if is_linear]
        if spec.gdn and linear:
            # A recomputed MLP is over when the backward pass comes to attention.
            is_full = model.megatron.get("recompute_granularity") == "full"
            of_layers = again - min(layer.mlp + layer.expert_activation for layer in linear) if is_full else 0.0
            working = max(working, of_layers + delta_work_bytes(spec.gdn, layout.tp, backward=True))
    in_flight = pp - stage if vpp == 1 else 2 * (pp - stage - 1) + (vpp - 1) * pp + 1
    in_flight = min(in_flight, num_micro_batches * vpp)
    if pp > 1:
        sent = spec.hidden * ITEM_BYTES[model.dtype] / (layout.tp if layout.sequence_parallel else 1)
        kept += sent * (1 - (stage == pp - 1) / vpp)  # the last chunk sends nothing
    return StageActivations(math.ceil(kept * in_flight * tokens), math.ceil(working * tokens))


def _mlp_gradient_bytes(spec: ModelSpec, model: MegatronModelConfig, has_experts: bool) -> float:
    at, item = model.parallel, ITEM_BYTES[model.dtype]
    hidden = (3 if at.sequence_parallel and at.tp > 1 else 2) * spec.hidden * item
    of_activation = 2 if model.megatron.get("bias_activation_fusion") else 3
    if not (has_experts and spec.moe):
        return float(hidden + of_activation * spec.ffn * item / at.tp)
    tokens = _expert_tokens(spec, model)
    inner = spec.moe.expert_ffn / at.etp
    # At the activation, the gradients of its input; at a product, those of its input and output.
    gradients = max(of_activation * inner, spec.hidden + inner)
    return hidden + max(tokens.seen * gradients, tokens.returning * spec.hidden) * item


def forward_activations(spec: ModelSpec, model: MegatronModelConfig, stage: int) -> int:
    """Return the bytes of a forward pass without backward in a pipeline stage, the tensors of one layer."""
    chunks = (layers_of_chunk(model.parallel, spec.num_layers, stage, chunk) for chunk in range(model.parallel.vpp))
    kinds = {(spec.has_experts(layer), spec.is_linear(layer)) for layers in chunks for layer in layers}
    return math.ceil(max(_forward_bytes(spec, model, *kind) for kind in kinds) * model.max_tokens_per_device)


def _forward_bytes(spec: ModelSpec, model: MegatronModelConfig, has_experts: bool, is_linear: bool) -> float:
    """Return the bytes per token of one layer in a forward pass without backward."""
    layer, item = layer_bytes(spec, model, has_experts, is_linear), ITEM_BYTES[model.dtype]
    mlp = _mlp_forward_bytes(spec, model, layer, has_experts)
    if not (spec.gdn and is_linear):
        return mlp
    return max(mlp, layer.residual + layer.norms + delta_forward_bytes(spec.gdn, model.parallel.tp, item))


def _mlp_forward_bytes(
    spec: ModelSpec, model: MegatronModelConfig, layer: LayerActivations, has_experts: bool
) -> float:
    item, at = ITEM_BYTES[model.dtype], model.parallel
    gathered = spec.hidden * item if at.sequence_parallel and at.tp > 1 else 0
    if not (has_experts and spec.moe):
        attention = layer.attention + layer.up_projected
        return layer.total - min(attention, layer.mlp) + gathered  # attention is over when the MLP begins
    tokens = _expert_tokens(spec, model)
    inner = tokens.seen * 3 * spec.moe.expert_ffn / at.etp * item
    inputs = layer.total - layer.attention - layer.up_projected - layer.expert_activation - inner * 2 / 3
    most = max(tokens.computing * spec.hidden * item + inner, tokens.returning * spec.hidden * item)
    return max(layer.total - layer.mlp - layer.expert_activation, inputs + most) + gathered


@dataclass(frozen=True)
class _ExpertTokens:
    """Tokens at the experts of a rank, per token of the device. Each is a row of the hidden size."""

    seen: float
    """Inputs of the experts: from all ranks that share them, with `etp` gathered."""
    computing: float
    """Alive while the experts work, in addition to their inputs: sorted, received, and their outputs."""
    returning: float
    """Alive while their outputs return, in addition to their inputs."""


def _expert_tokens(spec: ModelSpec, model: MegatronModelConfig) -> _ExpertTokens:
    at, moe = model.parallel, spec.moe
    assert moe is not None, "only a mixture has tokens at experts"
    sent = moe.experts_per_token / (at.tp if at.sequence_parallel else 1)
    most = moe.num_experts / moe.experts_per_token  # an expert takes a token at most once
    received = sent * (min(ASSUMPTIONS.expert_imbalance, most) if at.ep > 1 else 1)
    seen = received * at.etp
    sorts = moe.num_experts > at.ep
    computing = sent + (received if at.ep > 1 and (sorts or at.etp > 1) else 0) + seen
    returning = computing + (seen if sorts else sent)
    if at.etp > 1:  # in float32, before and after the sum over the ranks
        returning += 2 * seen + 2 * received
    return _ExpertTokens(seen, computing, returning)


def head_bytes(
    spec: ModelSpec, model: MegatronModelConfig, head: Head, *, backward: bool, device: Literal["cpu", "gpu"] = "gpu"
) -> int:
    """Return the bytes of the last stage's head, if every token of a micro-batch is scored."""
    tokens, item = model.max_tokens_per_device, ITEM_BYTES[model.dtype]
    hidden = tokens * spec.hidden * (item + (4 + item if backward else 0))
    if head == "score":
        return hidden
    weight = padded_vocab(spec.vocab, model.parallel.tp) // model.parallel.tp * spec.hidden * item if backward else 0
    return hidden + weight + _TILES_AT_ONCE * max(TILE_BYTES[device], MIN_COLUMNS * 4 * tokens)


def _with_recomputation(
    layers: list[LayerActivations], megatron: dict[str, Any], fused_norm: bool
) -> tuple[float, float]:
    """Return the bytes per token that the layers of a chunk keep, and the bytes recomputed at a time."""
    granularity = megatron.get("recompute_granularity")
    if granularity == "selective":
        modules = set(megatron.get("recompute_modules") or ())
        lighter = [_selective(layer, modules, fused_norm) for layer in layers]
        return sum(layer.total for layer in lighter), max(
            a.total - b.total for a, b in zip(layers, lighter, strict=True)
        )
    if granularity != "full":
        return sum(layer.total for layer in layers), 0.0
    number = int(megatron.get("recompute_num_layers") or 1)
    if megatron.get("recompute_method") == "block":
        again, rest = layers[:number], layers[number:]
        kept = sum(layer.residual for layer in again) + sum(layer.total for layer in rest)
        return kept, max((layer.total for layer in again), default=0.0)
    groups = [layers[start : start + number] for start in range(0, len(layers), number)]
    return sum(group[0].residual for group in groups), max(sum(layer.total for layer in group) for group in groups)


def _selective(layer: LayerActivations, modules: set[str], fused_norm: bool) -> LayerActivations:
    if modules & {"mlp", "moe"}:
        is_dense = not layer.expert_activation
        # There are two norms. The output of attention's norm is kept.
        norms = layer.norms / 2 if fused_norm and is_dense and "mlp" in modules else layer.norms
        layer = replace(layer, norms=norms, mlp=0.0, expert_activation=0.0)
    if "mla_up_proj" in modules:
        layer = replace(layer, up_projected=0.0)
    if "moe_act" in modules:
        layer = replace(layer, expert_activation=0.0)
    if "layernorm" in modules:
        layer = replace(layer, norms=0.0)
    return layer
