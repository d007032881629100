"""Bytes of a weight update: what each device of an engine gets, and what reaches the busiest device over links."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cache

from mrl.config.arithmetic import role_mesh, shard_size
from mrl.config.mesh import Mesh
from mrl.config.schema import Config, ParallelConfig
from mrl.dtypes import ITEM_BYTES
from mrl.models.fp8_scales import FP8, SCALE, Fp8Form
from mrl.models.layout import layers_of_chunk
from mrl.models.rollout_table import EngineSizes, Fused, embedding_tensors, head_tensors, layer_tensors
from mrl.models.spec import ModelSpec
from mrl.rollout.quantization import sent_form
from mrl.weight_sync.intersections import Kind, ShardIntersections, ShardOwner
from mrl.weight_sync.row_planner import RowIntersections, sizes_for_fp8


def sent_sizes(config: Config, spec: ModelSpec) -> EngineSizes:
    """Return the split of the engines, with the form in which their weights arrive."""
    sizes, form = EngineSizes.of(config.rollout, spec), sent_form(config.rollout, spec)
    return sizes if form is None else _in_fp8(spec, config.actor.parallel, shard_size(config, "actor"), sizes, form)


@cache
def _in_fp8(
    spec: ModelSpec, layout: ParallelConfig, shards: int | None, sizes: EngineSizes, form: Fp8Form
) -> EngineSizes:
    return sizes_for_fp8(spec, layout, shards, sizes, form)


def handed_over(spec: ModelSpec, sizes: EngineSizes, dtype: str) -> tuple[int, int]:
    """Return the bytes that the first worker of an engine gets, and those of the largest tensor."""
    sums, largest = 0, 0
    parts = [(1, (*embedding_tensors(spec, sizes, 0), *head_tensors(spec, sizes, 0)))]
    parts += [(len(layers), (*layer_tensors(spec, sizes, 0, layers[0]),)) for layers in spec.layers_by_kind().values()]
    for count, tensors in parts:
        num_bytes = [math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype or dtype] for tensor in tensors]
        sums, largest = sums + count * sum(num_bytes), max(largest, *num_bytes)
    return sums, largest


@dataclass(frozen=True)
class RankTraffic:
    """Bytes that one rank receives for the worker on its device."""

    link: int
    network: int


class ReshardTraffic:
    """Traffic between a training layout and the engines of one size on the same devices."""

    def __init__(self, intersections: ShardIntersections, mesh: Mesh, devices_per_node: int, dtype: str) -> None:
        self._mesh, self._devices_per_node, self._dtype = mesh, devices_per_node, dtype
        self._tp, self._regions = intersections.sizes.tp, intersections.regions
        self._groups = _groups(intersections.spec, intersections.layout)
        self._is_near = cache(self._has_copy)

    def received(self, rank: int) -> RankTraffic:
        """Return the bytes that a rank receives for the worker on its device. It already holds the others."""
        link = network = 0
        for (kind, stages), count in self._groups.items():
            for fused, regions in self._regions(kind, rank % self._tp, None):
                item = self._item_bytes(fused)
                for owner, region in regions.items():
                    if self._is_near(owner, stages, rank, rank + 1):
                        continue
                    first = rank - rank % self._devices_per_node
                    if self._is_near(owner, stages, first, first + self._devices_per_node):
                        link += count * region.num_elements * item
                    else:
                        network += count * region.num_elements * item
        return RankTraffic(link, network)

    def busiest(self) -> RankTraffic:
        """Return the traffic of the slowest rank, among the first and the last rank of each stage."""
        mesh, per_stage = self._mesh, self._mesh.world_size // self._mesh.pp
        ends = {rank for stage in range(mesh.pp) for rank in (stage * per_stage, (stage + 1) * per_stage - 1)}
        return max(map(self.received, ends), key=lambda traffic: (traffic.network, traffic.link))

    def _item_bytes(self, fused: Fused) -> int:
        """Return the bytes in which an element travels. The few float32 tensors of routers are counted as others."""
        is_own = fused.dtype == FP8 or fused.name.endswith(SCALE)
        return ITEM_BYTES[fused.dtype if is_own and fused.dtype else self._dtype]

    def _has_copy(self, owner: ShardOwner, stages: tuple[int, ...], first: int, end: int) -> bool:
        """Return whether one of these neighboring ranks holds the region."""
        mesh, per_stage = self._mesh, self._mesh.world_size // self._mesh.pp
        for rank in range(first, min(end, mesh.world_size)):
            if rank // per_stage not in stages:
                continue
            at = mesh.coordinates(rank)
            if owner.expert and at.ep != owner.ep:
                continue
            if owner.tp in (None, at.etp if owner.expert else at.tp):
                return True
        return False


def _groups(spec: ModelSpec, layout: ParallelConfig) -> Counter[tuple[Kind, tuple[int, ...]]]:
    """Return the number of groups of each kind in the stages. Tied embeddings belong to two."""
    last = layout.pp - 1
    groups: Counter[tuple[Kind, tuple[int, ...]]] = Counter()
    groups["embedding", (0, last) if spec.tied and last else (0,)] += 1
    groups["head", (last,)] += 1
    for stage in range(layout.pp):
        for chunk in range(layout.vpp):
            for layer in layers_of_chunk(layout, spec.num_layers, stage, chunk):
                groups[spec.kind(layer), (stage,)] += 1
    return groups


def busiest_traffic(config: Config, spec: ModelSpec) -> RankTraffic:
    """Return the traffic of the busiest device of engines on the trainer's devices."""
    model, mesh, here = config.actor, role_mesh(config, "actor"), config.cluster.devices_per_node
    sizes, dtype = sent_sizes(config, spec), config.rollout.vllm.get("dtype", model.dtype)
    intersections = ShardIntersections(spec, model.parallel, sizes)
    if (shards := shard_size(config, "actor")) is not None:
        mesh, intersections = Mesh(mesh.world_size, tp=shards), RowIntersections(spec, shards, sizes)
    return ReshardTraffic(intersections, mesh, here, dtype).busiest()
