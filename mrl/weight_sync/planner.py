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
from mrl.errors import PlacementError
from mrl.models.layout import Layout, RankPlace
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
    """Where a unit's parameters stand: a stage, its chunk, and the beginning of their names there."""

    stage: int
    chunk: int
    prefix: str


class Transfer(NamedTuple):
    """A part of one layer's tensor on its way: out of local parameters, into a tensor of a bucket."""

    home: ParameterSite
    tensor: int
    """Its number in the bucket."""
    part: ShardRegion


@dataclass(frozen=True)
class LayerGroup:
    """Neighbouring tensors with one home: a layer, the embedding, or what follows the layers.

    Tied embeddings have two homes, the first and the last stage: each may be nearer to somebody.
    """

    kind: Kind
    layer: int
    homes: tuple[ParameterSite, ...]


class BucketEntry(NamedTuple):
    """A tensor by the number of its unit and its own number there, and where it begins in its bucket."""

    unit: int
    number: int
    offset: int


@dataclass(frozen=True)
class PlannedTensor:
    """A fused tensor of the hosted worker, and its place in a bucket."""

    name: str
    fused: Fused
    offset: int


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
        """Elements that come from other ranks."""
        return sum(
            move.part.num_elements
            for bucket in self.buckets
            for source, moves in bucket.incoming.items()
            if source != self.rank
            for move in moves
        )


class ReshardPlanner:
    """Plans for any rank of a training layout and the engines beside it."""

    def __init__(self, spec: ModelSpec, layout: Layout, mesh: Mesh, rollout: RolloutLayout) -> None:
        layout.check(spec)
        rollout.check(spec, mesh.world_size)
        self.spec, self.layout, self.mesh, self.rollout = spec, layout, mesh, rollout
        self._ranks_per_stage = mesh.world_size // mesh.pp
        self._worker_of = {host: worker for worker, host in enumerate(rollout.hosts)}
        self.units = self._units()
        self._parts = ShardIntersections(spec, layout, rollout.sizes).parts
        self._pool = cache(self._find_pool)

    def plan(self, rank: int, sizes: BucketSizes) -> RankPlan:
        """What `rank` sends, receives and keeps."""
        own, worker = self._stage(rank), self._worker_of.get(rank)
        buckets = {stage: self._buckets(stage, sizes) for stage in {own, *map(self._stage, self.rollout.hosts)}}
        num_buckets = max(map(len, buckets.values()))
        incoming: list[dict[int, list[Transfer]]] = [defaultdict(list) for _ in range(num_buckets)]
        outgoing: list[dict[int, list[Transfer]]] = [defaultdict(list) for _ in range(num_buckets)]
        places = {stage: _places(cut) for stage, cut in buckets.items()}
        if worker is not None:
            for bucket, source, move in self._moves(worker, None, places[own]):
                incoming[bucket][source].append(move)
        for other, host in enumerate(self.rollout.hosts if rank < self.mesh.world_size else ()):
            for bucket, _, move in self._moves(other, rank, places[self._stage(host)]) if host != rank else ():
                outgoing[bucket][host].append(move)
        tensors = [] if worker is None else [self._planned(cut, worker) for cut in buckets[own]]
        planned = tuple(
            PlannedBucket(placed, dict(into), dict(out))
            for placed, into, out in zip_longest(tensors, incoming, outgoing, fillvalue=())
        )
        return RankPlan(rank, len(self.rollout.nodes), worker, self._worker_of, planned)

    def largest_tensor(self) -> int:
        """Elements of the largest fused tensor: no bucket can be smaller."""
        shapes = [fused.shape for kind in {unit.kind for unit in self.units} for fused, _ in self._parts(kind, 0, None)]
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

    # --- units and buckets ------------------------------------------------------------------------------------

    def _units(self) -> list[LayerGroup]:
        spec, layout = self.spec, self.layout
        last = ParameterSite(layout.pp - 1, layout.vpp - 1, "")
        homes = [ParameterSite(0, 0, "embedding.word_embeddings.")]
        if spec.tied and layout.pp > 1:
            homes.append(last._replace(prefix="output_layer."))
        units = [LayerGroup("embedding", 0, tuple(homes))]
        for stage in range(layout.pp):
            for chunk in range(layout.vpp):
                for local, layer in enumerate(layout.layers_of_chunk(spec.num_layers, stage, chunk)):
                    home = ParameterSite(stage, chunk, f"decoder.layers.{local}.")
                    units.append(LayerGroup("experts" if spec.has_experts(layer) else "dense", layer, (home,)))
        return [*units, LayerGroup("head", 0, (last,))]

    def _buckets(self, stage: int, sizes: BucketSizes) -> list[list[BucketEntry]]:
        """The buckets of the workers on a stage's devices: what the stage itself holds, then the next stage, and so on.

        So at any time each stage serves another part of the workers. In one order for all, everybody would wait for the
        first stage, then for the second.
        """
        buckets: list[list[BucketEntry]] = [[]]
        end = 0
        for number in sorted(
            range(len(self.units)), key=lambda n: (self.units[n].homes[0].stage - stage) % self.mesh.pp
        ):
            # Shapes are those of any tensor rank.
            for index, (fused, _) in enumerate(self._parts(self.units[number].kind, 0, None)):
                num_bytes = math.prod(fused.shape) * sizes.itemsize
                start = round_up(end, sizes.alignment)
                if start + num_bytes > sizes.slot_bytes and buckets[-1]:
                    buckets.append([])
                    start = 0
                buckets[-1].append(BucketEntry(number, index, start))
                end = start + num_bytes
        return buckets

    def _planned(self, bucket: list[BucketEntry], worker: int) -> tuple[PlannedTensor, ...]:
        tensors = []
        for place in bucket:
            unit = self.units[place.unit]
            fused, _ = self._parts(unit.kind, worker % self.rollout.sizes.tp, None)[place.number]
            tensors.append(PlannedTensor(_name(fused, unit), fused, place.offset))
        return tuple(tensors)

    def _stage(self, rank: int) -> int:
        """The stage that a rank holds, or, for a receiver, the one that it begins with."""
        return rank // self._ranks_per_stage % self.mesh.pp

    # --- moves ------------------------------------------------------------------------------------------------

    def _moves(
        self, worker: int, sender: int | None, places: dict[tuple[int, int], tuple[int, int]]
    ) -> Iterator[tuple[int, int, Transfer]]:
        """What a worker needs, or what of it one rank sends: bucket, source, and the move.

        Receiver and sender come to the same order, so a message needs no table of contents.
        """
        tp_rank, host = worker % self.rollout.sizes.tp, self.rollout.hosts[worker]
        stage = None if sender is None else self._stage(sender)
        holders = None if sender is None else self._holders(sender)
        for number, unit in enumerate(self.units):
            homes = {home.stage: home for home in unit.homes}
            if stage is not None and stage not in homes:
                continue
            turn = worker // self.rollout.sizes.tp + tp_rank + number
            for index, (_, parts) in enumerate(self._parts(unit.kind, tp_rank, holders)):
                bucket, tensor = places[number, index]
                for holder, part in parts.items():
                    pool = self._pool(holder, tuple(homes), host)
                    source = pool[turn % len(pool)]
                    if sender is None or source == sender:
                        yield bucket, source, Transfer(homes[self._stage(source)], tensor, part)

    def _holders(self, rank: int) -> frozenset[ShardOwner]:
        at = self.mesh.coordinates(rank)
        return frozenset({ShardOwner(False, 0, None), ShardOwner(False, 0, at.tp), ShardOwner(True, at.ep, at.etp)})

    def _find_pool(self, holder: ShardOwner, stages: tuple[int, ...], host: int) -> tuple[int, ...]:
        """The ranks from which `host` may take that part: itself, else those on its node, else any with a copy."""
        copies = [rank for stage in stages for rank in self._copies(holder, stage)]
        if host in copies:
            return (host,)
        nodes = self.rollout.nodes
        return tuple(rank for rank in copies if nodes[rank] == nodes[host]) or tuple(copies)

    def _copies(self, holder: ShardOwner, stage: int) -> range:
        start, stop = stage * self._ranks_per_stage, (stage + 1) * self._ranks_per_stage
        if holder.tp is None:
            return range(start, stop)
        if holder.expert:
            return range(start + holder.tp + self.mesh.etp * holder.ep, stop, self.mesh.etp * self.mesh.ep)
        return range(start + holder.tp, stop, self.mesh.tp)


def _places(buckets: list[list[BucketEntry]]) -> dict[tuple[int, int], tuple[int, int]]:
    """Bucket and number in it of each tensor, by its unit and number there."""
    return {
        (place.unit, place.number): (bucket, number)
        for bucket, places in enumerate(buckets)
        for number, place in enumerate(places)
    }


def _name(fused: Fused, unit: LayerGroup) -> str:
    """What a tensor of the example of a kind is called in another unit."""
    if unit.kind in ("embedding", "head"):
        return fused.name
    return f"model.layers.{unit.layer}.{fused.name.split('.', 3)[3]}"
