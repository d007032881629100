"""How much of an engine's weights comes over which link: the planner's own overlaps, counted by stage and node."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache

from mrl.config.mesh import Mesh
from mrl.models.layout import Layout
from mrl.models.rollout_table import EngineSizes
from mrl.models.spec import ModelSpec
from mrl.weight_sync.intersections import Kind, ShardIntersections, ShardOwner


@dataclass(frozen=True)
class RankTraffic:
    """Elements that one rank receives for the worker on its device."""

    link: int
    network: int


class ReshardTraffic:
    """Of one training layout and the engines of one size on the same devices."""

    def __init__(self, spec: ModelSpec, layout: Layout, mesh: Mesh, tp: int, devices_per_node: int) -> None:
        self._spec, self._mesh, self._tp, self._devices_per_node = spec, mesh, tp, devices_per_node
        self._groups = _groups(spec, layout)
        self._regions = ShardIntersections(spec, layout, EngineSizes(tp)).regions
        self._is_near = cache(self._has_copy)

    def received(self, rank: int) -> RankTraffic:
        """What a rank receives whose device has a worker; what it holds itself is not moved."""
        link = network = 0
        for (kind, stages), count in self._groups.items():
            for _, regions in self._regions(kind, rank % self._tp, None):
                for owner, region in regions.items():
                    if self._is_near(owner, stages, rank, rank + 1):
                        continue
                    first = rank - rank % self._devices_per_node
                    if self._is_near(owner, stages, first, first + self._devices_per_node):
                        link += count * region.num_elements
                    else:
                        network += count * region.num_elements
        return RankTraffic(link, network)

    def busiest(self) -> RankTraffic:
        """Of the rank for which it takes longest, among the first and the last of each stage."""
        mesh, per_stage = self._mesh, self._mesh.world_size // self._mesh.pp
        ends = {rank for stage in range(mesh.pp) for rank in (stage * per_stage, (stage + 1) * per_stage - 1)}
        return max(map(self.received, ends), key=lambda traffic: (traffic.network, traffic.link))

    def _has_copy(self, owner: ShardOwner, stages: tuple[int, ...], first: int, end: int) -> bool:
        """Whether one of these neighbouring ranks holds the region."""
        mesh, per_stage = self._mesh, self._mesh.world_size // self._mesh.pp
        for rank in range(first, min(end, mesh.world_size)):
            if rank // per_stage not in stages:
                continue
            if owner.tp is None:
                return True
            at = mesh.coordinates(rank)
            if (at.ep, at.etp) == (owner.ep, owner.tp) if owner.expert else at.tp == owner.tp:
                return True
        return False


def _groups(spec: ModelSpec, layout: Layout) -> Counter[tuple[Kind, tuple[int, ...]]]:
    """How many groups of each kind the stages have; tied embeddings have two."""
    last = layout.pp - 1
    groups: Counter[tuple[Kind, tuple[int, ...]]] = Counter()
    groups["embedding", (0, last) if spec.tied and last else (0,)] += 1
    groups["head", (last,)] += 1
    for stage in range(layout.pp):
        for chunk in range(layout.vpp):
            for layer in layout.layers_of_chunk(spec.num_layers, stage, chunk):
                groups["experts" if spec.has_experts(layer) else "dense", (stage,)] += 1
    return groups
