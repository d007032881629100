"""Who holds which slice of the weights, who needs it, and from whom it comes: arithmetic without a tensor.

Each rank plans its own part alone. That is quick however large the world is, because layers of a kind are alike: what
overlaps what is found once a kind, and a layer adds only its name and the ranks of its stage.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from typing import NamedTuple

from mrl.config.mesh import Mesh
from mrl.config.schema import ParallelConfig
from mrl.errors import PlacementError
from mrl.models.layout import RankPlace, check_layout, layers_of_chunk
from mrl.models.regions import Region, intersection, num_elements
from mrl.models.rollout_table import EngineSizes, Fused, rollout_tensors
from mrl.models.spec import ModelSpec
from mrl.models.table import Shard, shards_of
from mrl.rounding import round_up
from mrl.weight_sync.intersections import Kind, ShardIntersections, ShardOwner, ShardRegion


@dataclass(frozen=True)
class RolloutLayout:
    """The engines, and the ranks on their devices: trainer ranks, or receivers, whose numbers come after theirs."""

    sizes: EngineSizes
    hosts: tuple[int, ...]
    """The rank on the device of each worker; worker `replica * tp + rank` is that rank of that engine."""
    nodes: tuple[int, ...]
    """The node of each rank, receivers included."""

    def check(self, spec: ModelSpec, num_trainers: int) -> None:
        """Refuse engines that the model or the devices do not fit."""
        self.sizes.check(spec)
        num_ranks = len(self.nodes)
        if num_ranks < num_trainers:
            raise PlacementError(f"{num_ranks} ranks have a node, but there are {num_trainers} trainer ranks")
        if len(self.hosts) % self.sizes.tp:
            raise PlacementError(f"{len(self.hosts)} workers are no whole number of engines of tp {self.sizes.tp}")
        if len({*self.hosts}) < len(self.hosts) or not {*self.hosts} <= {*range(num_ranks)}:
            raise PlacementError(
                f"workers on the devices of ranks {list(self.hosts)}: each needs one of {num_ranks} for itself"
            )


class ParameterSite(NamedTuple):
    """Where a group's parameters stand: a stage, its chunk, and the beginning of their names there."""

    stage: int
    chunk: int
    prefix: str


class Transfer(NamedTuple):
    """A region of one layer's tensor on its way: out of local parameters, into a tensor of a bucket."""

    site: ParameterSite
    tensor: int
    """Its number in the bucket."""
    region: ShardRegion


@dataclass(frozen=True)
class LayerGroup:
    """Neighboring tensors with one site: a layer, the embedding, or what follows the layers.

    Tied embeddings have two sites, the first and the last stage: each may be nearer to somebody.
    """

    kind: Kind
    layer: int
    sites: tuple[ParameterSite, ...]


class PlannedTensor(NamedTuple):
    """A fused tensor of a worker, and where it begins in its bucket."""

    name: str
    fused: Fused
    """Of the example of its kind of layer: shape and padding are the same in every layer."""
    offset: int
    group: int
    number: int
    """Among the tensors of its group."""


@dataclass(frozen=True)
class PlannedBucket:
    """Tensors of the hosted worker that are handed over together, and what the rank sends for others' at that time."""

    tensors: tuple[PlannedTensor, ...]
    incoming: dict[int, list[Transfer]]
    """By the rank that they come from, which may be this one."""
    outgoing: dict[int, list[Transfer]]
    """By the rank that they go to, which is another."""


@dataclass(frozen=True)
class BucketSizes:
    """How tensors share a bucket; one that is larger than a slot has a bucket for itself."""

    slot_bytes: int
    itemsize: int
    alignment: int


@dataclass(frozen=True)
class RankPlan:
    """All that one rank does."""

    rank: int
    num_ranks: int
    worker: int | None
    """The worker on this rank's device."""
    worker_of: dict[int, int]
    """The worker on each rank's device, where there is one."""
    buckets: tuple[PlannedBucket, ...]

    def num_received(self) -> int:
        """Return how many elements come from other ranks."""
        return sum(
            transfer.region.num_elements
            for bucket in self.buckets
            for source, transfers in bucket.incoming.items()
            if source != self.rank
            for transfer in transfers
        )


class ReshardPlanner:
    """Plans for any rank of a training layout and the engines beside it."""

    def __init__(self, spec: ModelSpec, layout: ParallelConfig, mesh: Mesh, rollout: RolloutLayout) -> None:
        check_layout(layout, spec)
        rollout.check(spec, mesh.world_size)
        self.spec, self.layout, self.mesh, self.rollout = spec, layout, mesh, rollout
        self._ranks_per_stage = mesh.world_size // mesh.pp
        self._worker_of = {host: worker for worker, host in enumerate(rollout.hosts)}
        self.groups = self._groups()
        self._regions = ShardIntersections(spec, layout, rollout.sizes).regions
        self._sources = cache(self._find_sources)

    def plan(self, rank: int, sizes: BucketSizes) -> RankPlan:
        """Return what `rank` sends, receives and keeps."""
        own, worker = self._stage(rank), self._worker_of.get(rank)
        tensors = self._buckets(own, sizes, 0 if worker is None else worker % self.rollout.sizes.tp)
        others = {*map(self._stage, self.rollout.hosts)} - {own}
        buckets = {own: tensors} | {stage: self._buckets(stage, sizes) for stage in others}
        num_buckets = max(map(len, buckets.values()))
        incoming: list[dict[int, list[Transfer]]] = [defaultdict(list) for _ in range(num_buckets)]
        outgoing: list[dict[int, list[Transfer]]] = [defaultdict(list) for _ in range(num_buckets)]
        places = {stage: _places(cut) for stage, cut in buckets.items()}
        if worker is not None:
            for bucket, source, transfer in self._transfers(worker, None, places[own]):
                incoming[bucket][source].append(transfer)
        for other, host in enumerate(self.rollout.hosts if rank < self.mesh.world_size else ()):
            for bucket, _, transfer in self._transfers(other, rank, places[self._stage(host)]) if host != rank else ():
                outgoing[bucket][host].append(transfer)
        planned = tuple(
            PlannedBucket(tuple(placed), dict(into), dict(out))
            for placed, into, out in zip_longest([] if worker is None else tensors, incoming, outgoing, fillvalue=())
        )
        return RankPlan(rank, len(self.rollout.nodes), worker, self._worker_of, planned)

    def largest_tensor(self) -> int:
        """Return how many elements the largest fused tensor has: no bucket can be smaller."""
        shapes = [
            fused.shape for kind in {group.kind for group in self.groups} for fused, _ in self._regions(kind, 0, None)
        ]
        return max(map(math.prod, shapes))

    def least_received(self, rank: int) -> int:
        """Elements that the worker on this rank's device needs and the rank does not hold: nobody can move fewer.

        Found from the tables of the two sides, not from the plan.
        """
        if (worker := self._worker_of.get(rank)) is None:
            return 0
        held: dict[str, list[Region]] = defaultdict(list)
        for shard in self._held(rank):
            for piece in shard.pieces:
                held[piece.hf].append(piece.source)
        count = 0
        for fused in rollout_tensors(self.spec, self.rollout.sizes, worker % self.rollout.sizes.tp):
            for piece in fused.pieces:
                count += num_elements(piece.source)
                overlaps = {intersection(piece.source, box) for box in held[piece.hf]}
                count -= sum(num_elements(box) for box in overlaps if box)
        return count

    def _held(self, rank: int) -> list[Shard]:
        if rank >= self.mesh.world_size:
            return []
        at = self.mesh.coordinates(rank)
        return shards_of(self.spec, self.layout, RankPlace(at.tp, at.pp, at.ep, at.etp), "lm")

    # --- groups of tensors, and buckets ---------------------------------------------------------------------

    def _groups(self) -> list[LayerGroup]:
        spec, layout = self.spec, self.layout
        last = ParameterSite(layout.pp - 1, layout.vpp - 1, "")
        sites = [ParameterSite(0, 0, "embedding.word_embeddings.")]
        if spec.tied and layout.pp > 1:
            sites.append(last._replace(prefix="output_layer."))
        groups = [LayerGroup("embedding", 0, tuple(sites))]
        for stage in range(layout.pp):
            for chunk in range(layout.vpp):
                for local, layer in enumerate(layers_of_chunk(layout, spec.num_layers, stage, chunk)):
                    site = ParameterSite(stage, chunk, f"decoder.layers.{local}.")
                    groups.append(LayerGroup("experts" if spec.has_experts(layer) else "dense", layer, (site,)))
        return [*groups, LayerGroup("head", 0, (last,))]

    def _buckets(self, stage: int, sizes: BucketSizes, tp_rank: int = 0) -> list[list[PlannedTensor]]:
        """The buckets of the workers on a stage's devices: what the stage itself holds, then the next stage, and so on.

        So at any time each stage serves another part of the workers. In one order for all, everybody would wait for the
        first stage, then for the second.
        """
        buckets: list[list[PlannedTensor]] = [[]]
        end = 0
        for number in sorted(
            range(len(self.groups)), key=lambda n: (self.groups[n].sites[0].stage - stage) % self.mesh.pp
        ):
            group = self.groups[number]
            for index, (fused, _) in enumerate(self._regions(group.kind, tp_rank, None)):
                num_bytes = math.prod(fused.shape) * sizes.itemsize
                start = round_up(end, sizes.alignment)
                if start + num_bytes > sizes.slot_bytes and buckets[-1]:
                    buckets.append([])
                    start = 0
                buckets[-1].append(PlannedTensor(_name(fused, group), fused, start, number, index))
                end = start + num_bytes
        return buckets

    def _stage(self, rank: int) -> int:
        """Return the stage that a rank holds, or, for a receiver, the one that it begins with."""
        return rank // self._ranks_per_stage % self.mesh.pp

    # --- transfers --------------------------------------------------------------------------------------------

    def _transfers(
        self, worker: int, sender: int | None, places: dict[tuple[int, int], tuple[int, int]]
    ) -> Iterator[tuple[int, int, Transfer]]:
        """Yield what a worker needs, or what of it one rank sends: bucket, source, and the transfer.

        Receiver and sender come to the same order, so a message needs no table of contents.
        """
        # Four ranks of tp 2 with an engine of tp 1 on each device: to worker 0, beside rank 0, a layer's qkv comes in
        # two regions. That of tp 0 is rank 0's own; that of tp 1 is held by ranks 1 and 3, which take turns by layer.
        tp_rank, host = worker % self.rollout.sizes.tp, self.rollout.hosts[worker]
        stage = None if sender is None else self._stage(sender)
        owners = None if sender is None else self._owners(sender)
        for number, group in enumerate(self.groups):
            sites = {site.stage: site for site in group.sites}
            if stage is not None and stage not in sites:
                continue
            turn = worker // self.rollout.sizes.tp + tp_rank + number
            for index, (_, regions) in enumerate(self._regions(group.kind, tp_rank, owners)):
                bucket, tensor = places[number, index]
                for owner, region in regions.items():
                    sources = self._sources(owner, tuple(sites), host)
                    source = sources[turn % len(sources)]
                    if sender is None or source == sender:
                        yield bucket, source, Transfer(sites[self._stage(source)], tensor, region)

    def _owners(self, rank: int) -> frozenset[ShardOwner]:
        at = self.mesh.coordinates(rank)
        return frozenset({ShardOwner(False, 0, None), ShardOwner(False, 0, at.tp), ShardOwner(True, at.ep, at.etp)})

    def _find_sources(self, owner: ShardOwner, stages: tuple[int, ...], host: int) -> tuple[int, ...]:
        """The ranks from which `host` may take that region: itself, else those on its node, else any with a copy."""
        copies = [rank for stage in stages for rank in self._copies(owner, stage)]
        if host in copies:
            return (host,)
        nodes = self.rollout.nodes
        return tuple(rank for rank in copies if nodes[rank] == nodes[host]) or tuple(copies)

    def _copies(self, owner: ShardOwner, stage: int) -> range:
        start, stop = stage * self._ranks_per_stage, (stage + 1) * self._ranks_per_stage
        if owner.tp is None:
            return range(start, stop)
        if owner.expert:
            return range(start + owner.tp + self.mesh.etp * owner.ep, stop, self.mesh.etp * self.mesh.ep)
        return range(start + owner.tp, stop, self.mesh.tp)


def _places(buckets: list[list[PlannedTensor]]) -> dict[tuple[int, int], tuple[int, int]]:
    """Bucket and number in it of each tensor, by its group and number there."""
    return {
        (tensor.group, tensor.number): (bucket, position)
        for bucket, tensors in enumerate(buckets)
        for position, tensor in enumerate(tensors)
    }


def _name(fused: Fused, group: LayerGroup) -> str:
    """Return what a tensor of the example of a kind is called in another group."""
    if group.kind in ("embedding", "head"):
        return fused.name
    return f"model.layers.{group.layer}.{fused.name.split('.', 3)[3]}"
