"""Memory of a model that torch shards (`strategy: fsdp`), and the bytes that its ranks exchange.

A rank holds its rows of every tensor: float32 weights, gradients and Adam's two moments of a trained model. While a
layer works, its weights are whole in the compute dtype, and those of the next layer arrive: two layers. The root
(embedding, final norm, head) stays whole for the whole pass. In backward, the head's gradient waits for the
embedding's, a layer has its gradient, and the gradient of the layer before it is summed over the ranks in float32. At
the end the root's gradient is summed, when no layer works.

The layers are transformers' own. Compared with the layers that `activations.py` describes, they keep 10h bytes more per
token in bfloat16, because their norms have inputs in float32, and 5 bytes per element of queries and keys with norms;
they keep 2f bytes less of a dense MLP, and share cosines and sines. `mrl rehearse` shows the same peaks: exactly while
loading and scoring, within 3 % in training, and up to 5 % less with norms of the heads of queries and keys.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mrl.config.lora import LoraConfig
from mrl.config.mesh import Mesh
from mrl.config.schema import MegatronModelConfig, TrainedModelConfig
from mrl.dtypes import ITEM_BYTES
from mrl.models.adapters import adapter_tensors
from mrl.models.regions import Shape
from mrl.models.row_shards import row_shards
from mrl.models.spec import ModelSpec
from mrl.models.table import LM_HEAD, SCORE, Head, hf_tensors
from mrl.plan.activations import StageActivations, forward_activations, layer_bytes, stage_activations
from mrl.plan.weights import WeightBytes, stage_weights
from mrl.weight_sync.row_planner import untrained_tensors

_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
_RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_LAYERS_AT_ONCE = 2


def role_weights(spec: ModelSpec, model: MegatronModelConfig, mesh: Mesh, head: Head, stage: int) -> WeightBytes:
    """Return the bytes held by a rank of a pipeline stage, for either strategy."""
    if model.strategy == "megatron":
        return stage_weights(spec, model, mesh, head, stage)
    size = model.fsdp.shard_size or mesh.world_size
    shards = row_shards(hf_tensors(spec, head), untrained_tensors(spec), 0, size)  # no rank holds more than the first
    held = sum(math.prod(shard.shape) for shard in shards if shard.trained)
    if isinstance(model, TrainedModelConfig) and model.lora is not None:
        return _with_adapters(spec, model, model.lora, head, size)
    item = 4 if isinstance(model, TrainedModelConfig) else ITEM_BYTES[model.dtype]
    probe = WholeTensors.of(spec, model, head).compared(held * item)
    if not isinstance(model, TrainedModelConfig):
        return WeightBytes(held * item, 0, 0, 0, 0, 0, probe)
    return WeightBytes(held * 4, 0, held * 8, 0, 0, held * 12, probe)  # gradients exist only during an update


def _with_adapters(spec: ModelSpec, model: TrainedModelConfig, lora: LoraConfig, head: Head, size: int) -> WeightBytes:
    """Return the bytes of a frozen model with adapters: only they and a score head are trained, in float32."""
    frozen = 0
    for shard in row_shards(hf_tensors(spec, "lm"), untrained_tensors(spec), 0, size):
        if shard.trained and not (head == "score" and shard.name == LM_HEAD):
            frozen += math.prod(shard.shape) * ITEM_BYTES[model.dtype]
    trained = sum(math.prod(shard.shape) for shard in row_shards(_learning(spec, lora, head), (), 0, size))
    probe = WholeTensors.of(spec, model, head).compared(trained * 4)
    return WeightBytes(frozen + trained * 4, 0, trained * 8, 0, 0, trained * 12, probe)


def _learning(spec: ModelSpec, lora: LoraConfig, head: Head) -> dict[str, Shape]:
    """Return the tensors that learn on a frozen model."""
    return adapter_tensors(spec, lora) | ({SCORE: (1, spec.hidden)} if head == "score" else {})


@dataclass(frozen=True)
class WholeTensors:
    """Bytes of whole weights and gradients of a model that torch shards, at the moments of a pass."""

    layer: int
    """Elements of the largest layer."""
    root: int
    output: int
    """Elements of the output matrix."""
    item: int
    """Bytes of an element in the compute dtype."""
    in_layer: int
    """Elements of the largest layer that learn."""
    in_root: int
    in_output: int

    @classmethod
    def of(cls, spec: ModelSpec, model: MegatronModelConfig, head: Head) -> WholeTensors:
        layer, root = _layer_and_root(hf_tensors(spec, head))
        output = (spec.vocab if head == "lm" else 1) * spec.hidden
        if not isinstance(model, TrainedModelConfig) or model.lora is None:
            return cls(layer, root, output, ITEM_BYTES[model.dtype], layer, root, output)
        in_layer, in_root = _layer_and_root(_learning(spec, model.lora, head))
        return cls(layer + in_layer, root, output, ITEM_BYTES[model.dtype], in_layer, in_root, in_root)

    @property
    def weights(self) -> int:
        return (_LAYERS_AT_ONCE * self.layer + self.root) * self.item

    def forward(self, activations: int = 0) -> int:
        """Return the bytes in a forward pass: the root arrives in one buffer and is copied, before layers work."""
        return self.weights + max(0, self.root * self.item - activations)

    def compared(self, gradients: int) -> int:
        """Return the bytes while two gradients of the rank's rows are compared."""
        return max(self.forward(), 2 * gradients + self.backward())

    @property
    def in_head(self) -> int:
        """Return the bytes while the head works: no layer is whole."""
        return self.root * self.item

    def backward(self, activations: int = 0, released: int = 0) -> int:
        """Return the bytes while layers work in backward, or the root's gradient is summed, without `activations`.

        A layer releases what it kept for backward before the next layer works, while its gradient is summed.
        """
        gradients = (self.in_output + self.in_layer) * self.item + max(0, self.in_layer * 4 - released)
        return max(self.weights + gradients, self.in_root * (self.item + 4) - activations)


def _layer_and_root(tensors: Mapping[str, Shape]) -> tuple[int, int]:
    """Return the elements of the largest layer, and those outside layers."""
    layers: dict[str, int] = {}
    root = 0
    for name, shape in tensors.items():
        if match := _LAYER.search(name):
            layers[match[1]] = layers.get(match[1], 0) + math.prod(shape)
        else:
            root += math.prod(shape)
    return max(layers.values()), root


def role_activations(
    spec: ModelSpec, model: MegatronModelConfig, stage: int, num_micro_batches: int, device: str
) -> StageActivations:
    """Return what the layers keep for backward and need while they work, for either strategy."""
    on: str = "cpu" if device == "cpu" else "gpu"
    if model.strategy == "megatron":
        return stage_activations(spec, model, stage, num_micro_batches, on)  # type: ignore[arg-type]
    model = replace(model, megatron=_RECOMPUTED if model.fsdp.recompute else {})
    plain = stage_activations(spec, model, 0, 1, on)  # type: ignore[arg-type]
    layers, tokens = range(spec.num_layers), model.max_tokens_per_device
    more = {layer: _more_per_token(spec, model, layer) for layer in layers}
    moving = max(_moving_per_token(spec, model, layer) for layer in layers)
    if not model.fsdp.recompute:
        return StageActivations(plain.kept + math.ceil(sum(more.values()) * tokens), math.ceil(moving * tokens))
    kept = max(layer_bytes(spec, model, spec.has_experts(layer)).total + more[layer] for layer in layers)
    return replace(plain, at_work=math.ceil((kept + moving) * tokens))


def role_forward_bytes(spec: ModelSpec, model: MegatronModelConfig, stage: int) -> int:
    """Return the bytes of a forward pass without backward, for either strategy."""
    if model.strategy == "megatron":
        return forward_activations(spec, model, stage)
    if spec.moe is None:  # silu of the gates, ups, and their product
        return ITEM_BYTES[model.dtype] * (3 * spec.ffn + 5 * spec.hidden) * model.max_tokens_per_device
    more = max(_more_per_token(spec, model, layer) for layer in range(spec.num_layers))
    return forward_activations(spec, model, 0) + math.ceil(max(0.0, more) * model.max_tokens_per_device)


def _moving_per_token(spec: ModelSpec, model: MegatronModelConfig, layer: int) -> int:
    """Return the bytes per token of gradients while backward is in an MLP, in addition to what the layer keeps."""
    ffn = spec.ffn
    if spec.moe and spec.has_experts(layer):
        ffn = spec.moe.experts_per_token * spec.moe.expert_ffn + spec.moe.shared_ffn
    return ITEM_BYTES[model.dtype] * (ffn + 5 * spec.hidden)


def _more_per_token(spec: ModelSpec, model: MegatronModelConfig, layer: int) -> float:
    """Return the bytes that a layer of transformers keeps per token in addition to one of Megatron's."""
    item, has_experts = ITEM_BYTES[model.dtype], spec.has_experts(layer)
    more = 10 * spec.hidden + 8.0 if item < 4 else 0.0
    if spec.qk_norm and item < 4:
        more += 5 * (spec.num_heads + spec.num_kv_heads) * spec.head_dim
    if not has_experts:
        more -= item * spec.ffn
    return max(more - 4 * spec.rope.dim * item, 1.0 - layer_bytes(spec, model, has_experts).total)


def exchanged_bytes(spec: ModelSpec, model: MegatronModelConfig, mesh: Mesh, *, trains: bool) -> float:
    """Return the bytes that a rank receives in one micro-batch: weights forward and backward, and gradients."""
    size = model.fsdp.shard_size or mesh.world_size
    item = ITEM_BYTES[model.dtype]
    num_bytes = spec.num_parameters * item * (2 if trains else 1) + 4 * _num_learning(spec, model) * trains
    return num_bytes * (1 - 1 / size)


def copied_bytes(spec: ModelSpec, model: MegatronModelConfig, mesh: Mesh) -> float:
    """Return the bytes that a rank receives in one micro-batch from other copies: sums of its rows of gradients."""
    size = model.fsdp.shard_size or mesh.world_size
    return 2 * (1 - size / mesh.world_size) * 4 * _num_learning(spec, model) / size


def _num_learning(spec: ModelSpec, model: MegatronModelConfig) -> int:
    if not isinstance(model, TrainedModelConfig) or model.lora is None:
        return spec.num_parameters
    return sum(map(math.prod, adapter_tensors(spec, model.lora).values()))
