"""Bytes of parameters, gradients and optimizer state in Megatron's buffers, including padding.

They are counted from the family's table, which also loads weights, and checked against a running engine.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from mrl.config.mesh import Mesh
from mrl.config.schema import MegatronModelConfig, ParallelConfig, TrainedModelConfig
from mrl.dtypes import ITEM_BYTES
from mrl.models.adapters import adapter_pairs
from mrl.models.families import FAMILIES
from mrl.models.fp8_base import fp8_bytes, fp8_elements
from mrl.models.layout import RankPlace, layers_of_chunk
from mrl.models.spec import ModelSpec
from mrl.models.table import Head, dense_shards
from mrl.rounding import round_up

_PARAMETER_ALIGNMENT, _BUCKET_ALIGNMENT, _WIDE_BUCKET_ALIGNMENT = 64, 128, 1 << 16  # Megatron's alignments, in elements
_MIN_BUCKET = 40_000_000


@dataclass(frozen=True)
class Buffer:
    """One of Megatron's flat buffers on one rank."""

    num_elements: int
    """Elements of the rank's parameters."""
    num_padded: int
    """Length of the buffer."""
    num_owners: int
    """Number of ranks that share it in the distributed optimizer."""
    is_float32: bool = False
    """Whether it holds the float32 parameters of a 16-bit model. They are their own float32 copies."""


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of one rank."""

    parameters: int
    gradients: int
    optimizer: int
    """Optimizer bytes of the rank that owns the most."""
    largest_parameter: int
    layer_weight: int
    """The largest dense weight of a layer. Megatron makes a gradient of its shape even if it adds to the buffer."""
    checkpoint: int
    """Checkpoint bytes that the rank writes, from a copy on the host."""
    building: int
    """Bytes in addition to parameters and gradients, at the fullest moment while Megatron's buffers are made, or while
    a model that torch shards is compared with transformers."""
    dequantized: int = 0
    """The largest weight that a frozen model in FP8 makes for a product."""

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def stage_weights(spec: ModelSpec, model: MegatronModelConfig, mesh: Mesh, head: Head, stage: int) -> WeightBytes:
    """Return the bytes held by a rank of a pipeline stage. A trained model uses Megatron's distributed optimizer."""
    item = ITEM_BYTES[model.dtype]
    if not isinstance(model, TrainedModelConfig):
        layout = model.parallel
        held = sum(tensor.num_bytes(item) for tensor in _dense(spec, layout, stage, head))
        held += sum(sum(_experts(spec, layout, stage, chunk)) for chunk in range(layout.vpp)) * item
        return WeightBytes(held, 0, 0, 0, 0, 0, held)  # moved to one buffer after loading
    rank_buffers = buffers(spec, model, mesh, head, stage)
    if model.lora is not None:
        return _with_adapters(spec, model, mesh, rank_buffers, head, stage)
    owned = [min(buffer.num_padded // buffer.num_owners, buffer.num_elements) for buffer in rank_buffers]
    copied = sum(n for n, buffer in zip(owned, rank_buffers, strict=True) if item < 4 and not buffer.is_float32)
    gradient_item = 4 if model.ddp.get("grad_reduce_in_fp32", True) else item
    dense = _dense(spec, model.parallel, stage, head)
    frozen = sum(tensor.num_bytes(item) for tensor in dense if not tensor.is_trained)
    in_layers = _largest_in_layers(spec, replace(model.parallel, cp=1, ep=1, etp=1, sequence_parallel=False), stage)
    building = _building_bytes(rank_buffers, item, gradient_item)
    if item < 4:  # float32 weights, each made from a copy of its share
        largest = max(tensor.num_elements for tensor in dense)
        share = max(buffer.num_padded // buffer.num_owners for buffer in rank_buffers)
        has_head = head == "lm" and stage == model.parallel.pp - 1 and not spec.tied
        # A rehearsal shows that the vocabulary head is copied last if one rank owns everything, or if it fills a share.
        is_last = has_head and (share <= largest or all(buffer.num_owners == 1 for buffer in rank_buffers))
        building = max(building, copied * 4 + min(largest if is_last else in_layers, share) * item)
    return WeightBytes(
        sum(buffer.num_padded * _item(buffer, item) for buffer in rank_buffers) + frozen,
        sum(buffer.num_padded * max(gradient_item, 4 * buffer.is_float32) for buffer in rank_buffers),
        # The float32 copy of the weights, and Adam's two moments.
        optimizer=copied * 4 + sum(owned) * 8,
        largest_parameter=max(tensor.num_bytes(item) for tensor in dense),
        layer_weight=in_layers * item,
        checkpoint=sum(owned) * 12 + frozen,
        building=building,
    )


def _with_adapters(
    spec: ModelSpec, model: TrainedModelConfig, mesh: Mesh, rank_buffers: Sequence[Buffer], head: Head, stage: int
) -> WeightBytes:
    """Return the bytes of a frozen model with adapters. Only they and a score head have gradients and optimizer
    state."""
    item = ITEM_BYTES[model.dtype]
    owned = [min(buffer.num_padded // buffer.num_owners, buffer.num_elements) for buffer in rank_buffers]
    base = frozen_bytes(spec, model, mesh, head, stage)
    copied = sum(owned) * (item < 4)
    largest = max(size for *_, size in _adapters(spec, model, head, stage)) * item
    parameters = sum(buffer.num_padded for buffer in rank_buffers)
    gradients = parameters * (4 if model.ddp.get("grad_reduce_in_fp32", True) else item)
    saved, matrix = _saved_by_fp8(spec, model, stage)
    assert model.lora is not None, "only a model with adapters is frozen"
    loaded = saved if model.lora.base == "own" else 0
    return WeightBytes(
        base + parameters * item,
        gradients,
        optimizer=4 * copied + 8 * sum(owned),
        largest_parameter=largest,
        layer_weight=largest,
        checkpoint=sum(owned) * 12,
        # A model in FP8 is loaded whole, before anything is trained.
        building=max(_building_bytes(rank_buffers, item, 4), copied * 4, loaded - gradients),
        dequantized=matrix,
    )


def frozen_bytes(spec: ModelSpec, model: TrainedModelConfig, mesh: Mesh, head: Head, stage: int) -> int:
    """Return the bytes of the weights below the adapters."""
    frozen = MegatronModelConfig(parallel=model.parallel, dtype=model.dtype, max_tokens_per_device=1)
    score = spec.hidden * ITEM_BYTES[model.dtype] * (head == "score" and stage == model.parallel.pp - 1)  # in buffers
    return stage_weights(spec, frozen, mesh, head, stage).parameters - score - _saved_by_fp8(spec, model, stage)[0]


def _saved_by_fp8(spec: ModelSpec, model: TrainedModelConfig, stage: int) -> tuple[int, int]:
    """Return the bytes that FP8 saves, and those of the largest weight that is made from it."""
    if model.lora is None or model.lora.base_quantization is None:
        return 0, 0
    elements, largest = fp8_elements(spec, model.parallel, stage)
    return elements * ITEM_BYTES[model.dtype] - fp8_bytes(elements), largest * ITEM_BYTES[model.dtype]


def _adapters(spec: ModelSpec, model: TrainedModelConfig, head: Head, stage: int) -> list[tuple[int, bool, int]]:
    """Return chunk, whether it belongs to an expert, and elements of each adapter on the first rank of a stage, and of
    a score head.

    They are in the order of Megatron's modules.
    """
    assert model.lora is not None, "only a model with adapters has them"
    pairs = adapter_pairs(spec, model.lora, model.parallel, RankPlace(pp=stage))
    ordered = sorted(pairs, key=lambda pair: (pair.weight.chunk, pair.split != "columns"))  # linear_proj comes first
    held = [(shard.chunk, shard.expert, math.prod(shard.shape)) for pair in ordered for shard in (pair.a, pair.b)]
    has_score = head == "score" and stage == model.parallel.pp - 1
    return [*held, *([(model.parallel.vpp - 1, False, spec.hidden)] if has_score else [])]


def _item(buffer: Buffer, item: int) -> int:
    return 4 if buffer.is_float32 else item


def _building_bytes(rank_buffers: Sequence[Buffer], item: int, gradient_item: int) -> int:
    """Return the most bytes that Megatron needs beyond its buffers while it makes one after the other.

    The parameters of a buffer, and of all later ones, are outside the buffers until it is made.
    """
    missing, elsewhere, most = 0, 0, 0
    for buffer in reversed(rank_buffers):
        elsewhere += buffer.num_elements * _item(buffer, item)
        most = max(most, elsewhere - missing)
        missing += buffer.num_padded * (_item(buffer, item) + max(gradient_item, 4 * buffer.is_float32))
    return most


class _BufferForm(NamedTuple):
    """Properties of all buffers of a rank."""

    item: int
    """Bytes of a number of the model."""
    limit: int | None
    """Elements after which the first chunk begins another bucket."""
    multiple: int
    """Every bucket is padded to a multiple of this."""


def buffers(spec: ModelSpec, model: TrainedModelConfig, mesh: Mesh, head: Head, stage: int) -> tuple[Buffer, ...]:
    """Return Megatron's buffers on a rank: for each chunk, one for the dense parameters, one for float32 parameters in
    a 16-bit model, and one for experts that are reduced over other ranks."""
    limit = _bucket_limit(model, mesh.dp * mesh.cp) if stage == 0 else None
    form = _BufferForm(ITEM_BYTES[model.dtype], limit, _bucket_multiple(model))
    if model.lora is not None:
        return tuple(_adapter_buffers(_adapters(spec, model, head, stage), model.parallel, form, mesh))
    return _whole_model_buffers(spec, model.parallel, form, mesh, head, stage)


@cache
def _whole_model_buffers(
    spec: ModelSpec, layout: ParallelConfig, form: _BufferForm, mesh: Mesh, head: Head, stage: int
) -> tuple[Buffer, ...]:
    separate_experts, dense_owners = _separate_experts(mesh), mesh.dp * mesh.cp
    is_wide = form.item == 4
    made = []
    for chunk in range(layout.vpp):
        trained = [held for held in _dense(spec, layout, stage, head) if held.chunk == chunk and held.is_trained]
        dense = [held.num_elements for held in trained if is_wide or not held.is_float32]
        float32 = [held.num_elements for held in trained if held.is_float32 and not is_wide]
        experts = _experts(spec, layout, stage, chunk)
        first, last = stage == chunk == 0, (stage, chunk) == (layout.pp - 1, layout.vpp - 1)
        alone = []  # tied embeddings have their own bucket
        if spec.tied and head == "lm" and layout.pp > 1 and (first or last):
            alone = [dense.pop(0 if first else -1)]
        limit = form.limit if first else None
        groups = [([*dense, *([] if separate_experts else experts)], alone, dense_owners, False)]
        groups += [(float32, [], dense_owners, True)]
        groups += [([*experts], [], mesh.edp, False)] if separate_experts else []
        for members, separate, owners, is_float32 in groups:
            if members or separate:
                multiple = math.lcm(owners, form.multiple)
                padded = sum(_padded_buckets(members, limit, multiple)) + sum(round_up(n, multiple) for n in separate)
                made.append(Buffer(sum(members) + sum(separate), padded, owners, is_float32))
    return tuple(made)


def _separate_experts(mesh: Mesh) -> bool:
    """Return whether experts are reduced over other ranks than dense parameters."""
    return mesh.ep > 1 or mesh.etp != mesh.tp


def _adapter_buffers(
    adapters: Sequence[tuple[int, bool, int]], layout: ParallelConfig, form: _BufferForm, mesh: Mesh
) -> Iterator[Buffer]:
    separate_experts = _separate_experts(mesh)
    for chunk in range(layout.vpp):
        limit = form.limit if chunk == 0 else None
        for of_experts, owners in ((False, mesh.dp * mesh.cp), (True, mesh.edp)):
            held = [n for at, expert, n in adapters if at == chunk and (expert and separate_experts) == of_experts]
            if held:
                padded = sum(_padded_buckets(held, limit, math.lcm(owners, form.multiple)))
                yield Buffer(sum(held), padded, owners)


class _Dense(NamedTuple):
    """A dense parameter, or a buffer of the table."""

    chunk: int
    num_elements: int
    is_float32: bool
    is_trained: bool

    def num_bytes(self, item: int) -> int:
        return self.num_elements * (4 if self.is_float32 else item)


def _dense(spec: ModelSpec, layout: ParallelConfig, stage: int, head: Head) -> tuple[_Dense, ...]:
    """Return each dense parameter and buffer, in the table's order, for the first rank of tp and pp."""
    # A search tries hundreds of layouts that differ only in what does not split dense parameters.
    return _dense_parameters(spec, replace(layout, cp=1, ep=1, etp=1, sequence_parallel=False), stage, head)


@cache
def _dense_parameters(spec: ModelSpec, layout: ParallelConfig, stage: int, head: Head) -> tuple[_Dense, ...]:
    place = RankPlace(pp=stage)
    # A stage's experts are counted separately, because there are thousands of identical ones.
    return tuple(
        _Dense(shard.chunk, math.prod(shard.shape), shard.dtype == "float32", shard.trained)
        for shard in dense_shards(spec, layout, place, head)
    )


@cache
def _largest_in_layers(spec: ModelSpec, layout: ParallelConfig, stage: int) -> int:
    shards = dense_shards(spec, layout, RankPlace(pp=stage), "score")
    return max((math.prod(shard.shape) for shard in shards if ".layers." in shard.name), default=0)


@cache
def _experts(spec: ModelSpec, layout: ParallelConfig, stage: int, chunk: int) -> tuple[int, ...]:
    """Return the elements of each expert parameter that one rank holds in a chunk."""
    if spec.moe is None:
        return ()
    layers = [n for n in layers_of_chunk(layout, spec.num_layers, stage, chunk) if spec.has_experts(n)]
    if not layers:
        return ()
    expert = FAMILIES[spec.family].expert(spec, layers[0], 0)
    per_expert = tuple(math.prod(parameter.share(0, layout.etp)[0]) for parameter in expert)
    return per_expert * (spec.moe.num_experts // layout.ep) * len(layers)


def _padded_buckets(members: Sequence[int], limit: int | None, multiple: int) -> Iterator[int]:
    """Yield the lengths of buckets, filled from the last parameter on. Without a limit, there is one bucket. With a
    limit, the result is exact up to one bucket's padding, because Megatron's order of parameters within a layer
    differs."""
    if limit is None and members:  # thousands of identical experts
        aligned = sum(round_up(size, _PARAMETER_ALIGNMENT) * num for size, num in Counter(members).items())
        yield round_up(aligned - round_up(members[0], _PARAMETER_ALIGNMENT) + members[0], multiple)
        return
    filled = 0
    for elements in reversed(members):
        filled = round_up(filled, _PARAMETER_ALIGNMENT) + elements
        if limit is not None and filled >= limit:
            yield round_up(filled, multiple)
            filled = 0
    if filled:
        yield round_up(filled, multiple)


def _bucket_limit(model: TrainedModelConfig, owners: int) -> int | None:
    """Return the elements after which Megatron begins another bucket of the first chunk; None for one bucket."""
    if not model.ddp.get("overlap_grad_reduce"):
        return None
    limit: int = model.ddp.get("bucket_size") or max(_MIN_BUCKET, 1_000_000 * owners)
    return limit


def _bucket_multiple(model: TrainedModelConfig) -> int:
    return _WIDE_BUCKET_ALIGNMENT if model.ddp.get("pad_buckets_for_high_nccl_busbw") else _BUCKET_ALIGNMENT
