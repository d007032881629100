"""Bytes of a weight update: what each device of an engine gets, and what reaches the busiest device over links."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from mrl.config.arithmetic import role_mesh, shard_size
from mrl.config.mesh import Mesh
from mrl.config.schema import Config, ParallelConfig
from mrl.dtypes import ITEM_BYTES
from mrl.models.fp8_scales import FP8, SCALE, Fp8Form
from mrl.models.layout import layers_of_chunk
from mrl.models.rollout_table import EnginePart, EngineSizes, Fused, largest_stage
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


@cache  # a search asks for each of its layouts
def handed_over(spec: ModelSpec, sizes: EngineSizes, dtype: str) -> tuple[int, int]:
    """Return the bytes that the worker of an engine with the most gets, and those of the largest tensor."""
    return largest_stage(spec, sizes, lambda tensor: math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype or dtype])


@dataclass(frozen=True)
class RankTraffic:
    """Bytes that one rank receives for the worker on its device."""

    link: int
    network: int


class ReshardTraffic:
    """Traffic between a training layout and the engines of one size on the same devices."""

    def __init__(self, intersections: ShardIntersections, mesh: Mesh, devices_per_node: int, dtype: str) -> None:
        self._mesh, self._devices_per_node, self._dtype = mesh, devices_per_node, dtype
        self._spec, self._sizes, self._regions = intersections.spec, intersections.sizes, intersections.regions
        self._groups = _groups(intersections.spec, intersections.layout)
        self._is_near = cache(self._has_copy)

    def received(self, rank: int) -> RankTraffic:
        """Return the bytes that a rank receives for the worker on its device. It already holds the others."""
        link = network = 0
        place = self._sizes.place(rank)
        for (kind, stages), parts in self._groups.items():
            count = sum(place.stage in self._sizes.stages_with(self._spec, part) for part in parts)
            for fused, regions in self._regions(kind, place.rank, None) if count else ():
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
        """Return the traffic of the slowest rank, among the first and the last rank of each stage of the trainer, and
        of each stage of the first and the last engine there."""
        mesh, per_stage, tp = self._mesh, self._mesh.world_size // self._mesh.pp, self._sizes.tp
        ends = {rank for stage in range(mesh.pp) for rank in (stage * per_stage, (stage + 1) * per_stage - 1)}
        if self._sizes.pp > 1:
            first, workers = {end - end % tp for end in ends}, self._sizes.num_workers
            ends |= {rank for end in first for rank in range(end, min(end + workers, mesh.world_size), tp)}
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


def _groups(spec: ModelSpec, layout: ParallelConfig) -> Mapping[tuple[Kind, tuple[int, ...]], list[EnginePart]]:
    """Return the groups of each kind in the stages, as engines divide them. Tied embeddings belong to two stages."""
    last = layout.pp - 1
    groups: dict[tuple[Kind, tuple[int, ...]], list[EnginePart]] = defaultdict(list)
    groups["embedding", (0, last) if spec.tied and last else (0,)].append("embedding")
    groups["head", (last,)].append("head")
    for stage in range(layout.pp):
        for chunk in range(layout.vpp):
            for layer in layers_of_chunk(layout, spec.num_layers, stage, chunk):
                groups[spec.kind(layer), (stage,)].append(layer)
    return groups


def busiest_traffic(config: Config, spec: ModelSpec) -> RankTraffic:
    """Return the traffic of the busiest device of engines on the trainer's devices."""
    model, mesh, here = config.actor, role_mesh(config, "actor"), config.cluster.devices_per_node
    sizes, dtype = sent_sizes(config, spec), config.rollout.vllm.get("dtype", model.dtype)
    intersections = ShardIntersections(spec, model.parallel, sizes)
    if (shards := shard_size(config, "actor")) is not None:
        mesh, intersections = Mesh(mesh.world_size, tp=shards), RowIntersections(spec, shards, sizes)
    return ReshardTraffic(intersections, mesh, here, dtype).busiest()
