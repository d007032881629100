"""Plan of a weight update: which rank holds which slice, who needs it, and who sends it. No tensors are needed.

Each rank plans its part alone. This is fast for any number of ranks, because layers of the same kind are equal:
intersections are computed once per kind, and a layer only adds its name and the ranks of its stage.
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
from mrl.dtypes import ITEM_BYTES
from mrl.models.fp8_scales import FP8, SCALE, scale_pieces
from mrl.models.layout import RankPlace, check_layout, layers_of_chunk
from mrl.models.regions import Region, intersection, num_elements
from mrl.models.rollout_table import EnginePart, Fused, rollout_tensors
from mrl.models.spec import ModelSpec
from mrl.models.table import Shard, float32_tensors, shards_of
from mrl.rounding import round_up
from mrl.weight_sync.copies import Copies, Workers
from mrl.weight_sync.intersections import Kind, ShardIntersections, ShardOwner, ShardRegion
from mrl.weight_sync.rollout_layout import RolloutLayout


class ParameterSite(NamedTuple):
    """Place of a group's parameters: a stage, its chunk, and the prefix of their names."""

    stage: int
    chunk: int
    prefix: str


class Transfer(NamedTuple):
    """Transfer of a region of one layer's tensor, from local parameters to a tensor of a bucket."""

    site: ParameterSite
    tensor: int
    """Number of the tensor in the bucket."""
    region: ShardRegion


@dataclass(frozen=True)
class LayerGroup:
    """Neighboring tensors with the same site: a layer, the embedding, or the parameters after the layers.

    Tied embeddings have two sites, the first and the last stage, so that workers can use the nearer one.
    """

    kind: Kind
    layer: int
    sites: tuple[ParameterSite, ...]

    @property
    def part(self) -> EnginePart:
        """The group without its kind, which decides the stages of an engine that hold it."""
        return "embedding" if self.kind == "embedding" else "head" if self.kind == "head" else self.layer


class PlannedTensor(NamedTuple):
    """A fused tensor of a worker, and its offset in its bucket."""

    name: str
    fused: Fused
    """Tensor of the example of its kind of layer: shape and padding are the same in every layer."""
    offset: int
    group: int
    number: int
    """Number among the tensors of its group."""


@dataclass(frozen=True)
class PlannedBucket:
    """Tensors that this rank hands to its worker together, and the slices that it sends to others meanwhile."""

    tensors: tuple[PlannedTensor, ...]
    incoming: dict[int, list[Transfer]]
    """Transfers by source rank, which may be this rank."""
    outgoing: dict[int, list[Transfer]]
    """Transfers by destination rank, never this rank."""
    dtype: str
    """Dtype in which its elements travel between ranks."""


@dataclass(frozen=True)
class BucketSizes:
    """Packing rules of buckets. A tensor that is larger than a slot gets its own bucket.

    Tensors that both sides hold in float32 next to bfloat16 travel in separate buckets. Tensors in FP8 do the
    same, after their scales in float32.
    """

    slot_bytes: int
    dtype: str
    """Dtype of the engines' tensors for which their table has no other."""
    trained_dtype: str
    """Dtype of the trainer's model."""
    alignment: int

    @property
    def travels_as(self) -> str:
        """Return the narrower of the two dtypes: rounding and moving commute."""
        return min(self.dtype, self.trained_dtype, key=ITEM_BYTES.__getitem__)

    def num_bytes(self, fused: Fused) -> int:
        return math.prod(fused.shape) * ITEM_BYTES[fused.dtype or self.dtype]


@dataclass(frozen=True)
class RankPlan:
    """Everything that one rank does."""

    rank: int
    num_ranks: int
    worker: int | None
    """The worker on this rank's device."""
    worker_of: dict[int, int]
    """The worker on each rank's device, if any."""
    buckets: tuple[PlannedBucket, ...]

    def num_received(self) -> int:
        """Return the number of elements that come from other ranks."""
        return sum(map(self._num_received, self.buckets))

    def bytes_received(self) -> int:
        return sum(self._num_received(bucket) * ITEM_BYTES[bucket.dtype] for bucket in self.buckets)

    def _num_received(self, bucket: PlannedBucket) -> int:
        return sum(
            transfer.region.num_elements
            for source, transfers in bucket.incoming.items()
            if source != self.rank
            for transfer in transfers
        )


class ReshardPlanner:
    """Plans the transfers of any rank of a training layout and its engines."""

    def __init__(
        self,
        spec: ModelSpec,
        layout: ParallelConfig,
        mesh: Mesh,
        rollout: RolloutLayout,
        intersections: ShardIntersections | None = None,
    ) -> None:
        check_layout(layout, spec)
        rollout.check(spec, mesh.world_size)
        self.spec, self.layout, self.mesh, self.rollout = spec, layout, mesh, rollout
        self._ranks_per_stage = mesh.world_size // mesh.pp
        self._worker_of = {host: worker for worker, host in enumerate(rollout.hosts)}
        self._leader_of = rollout.leaders if rollout.in_step else {}
        self.groups = self._groups()
        self._regions = (intersections or ShardIntersections(spec, layout, rollout.sizes)).regions
        self._place = rollout.sizes.place
        self._engine_stages = [rollout.sizes.stages_with(spec, group.part) for group in self.groups]
        places = [self._place(worker).stage for worker in range(rollout.sizes.num_workers)]
        self._positions = [
            [position for position, stage in enumerate(places) if stage in stages] for stages in self._engine_stages
        ]
        self._workers = Workers(rollout.hosts, rollout.nodes, rollout.sizes.num_workers)
        self._copies = cache(self._find_copies)
        self._wide = float32_tensors(spec)
        self._travel = cache(self._find_travel)

    def plan(self, rank: int, sizes: BucketSizes) -> RankPlan:
        """Return what `rank` sends, receives and keeps."""
        buckets = [bucket for dtype in self._travel_dtypes(sizes) for bucket in self._planned(rank, sizes, dtype)]
        return RankPlan(rank, len(self.rollout.nodes), self._worker_of.get(rank), self._worker_of, tuple(buckets))

    def _planned(self, rank: int, sizes: BucketSizes, dtype: str) -> Iterator[PlannedBucket]:
        """Yield the buckets whose elements travel in a dtype. All ranks have the same number of them."""
        worker = self._worker_of.get(rank)
        orders = {self._order(worker) for worker in range(len(self.rollout.hosts))}
        buckets = {order: self._buckets(order, sizes, dtype) for order in orders}
        tensors = [] if worker is None else self._buckets(self._order(worker), sizes, dtype, self._place(worker).rank)
        num_buckets = max(map(len, buckets.values()))
        incoming: list[dict[int, list[Transfer]]] = [defaultdict(list) for _ in range(num_buckets)]
        outgoing: list[dict[int, list[Transfer]]] = [defaultdict(list) for _ in range(num_buckets)]
        places = {order: _places(cut) for order, cut in buckets.items()}
        if worker is not None:
            for bucket, source, transfer in self._received(worker, places[self._order(worker)]):
                incoming[bucket][source].append(transfer)
        if rank < self.mesh.world_size:
            for bucket, host, transfer in self._sent(rank, places):
                outgoing[bucket][host].append(transfer)
        for placed, received, sent in zip_longest(tensors, incoming, outgoing, fillvalue=()):
            yield PlannedBucket(tuple(placed), dict(received), dict(sent), dtype)

    def largest_bytes(self, dtype: str) -> int:
        """Return the bytes of the largest fused tensor of an engine in that dtype, the lower limit of a bucket's
        size."""
        tensors = [fused for kind in {group.kind for group in self.groups} for fused, _ in self._regions(kind, 0, None)]
        return max(math.prod(fused.shape) * ITEM_BYTES[fused.dtype or dtype] for fused in tensors)

    def least_received(self, rank: int) -> int:
        """Return how many elements the worker on this rank's device needs and the rank does not hold: the minimum
        traffic.

        It is computed from the two sides' tables, not from the plan.
        """
        if (worker := self._worker_of.get(rank)) is None:
            return 0
        boxes: dict[str, list[Region]] = defaultdict(list)
        for shard in self.shards(rank):
            scales = scale_pieces(shard.pieces, self.rollout.sizes.fp8) if self.rollout.sizes.fp8 else ()
            for piece in (*shard.pieces, *scales):
                boxes[piece.hf].append(piece.source)
        count = 0
        for fused in rollout_tensors(self.spec, self.rollout.sizes, worker):
            for piece in fused.pieces:
                count += num_elements(piece.source)
                overlaps = {intersection(piece.source, box) for box in boxes[piece.hf]}
                count -= sum(num_elements(box) for box in overlaps if box is not None)
        return count

    def shards(self, rank: int) -> list[Shard]:
        """Return the shards that a rank holds; none if it is a receiver."""
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
                    groups.append(LayerGroup(spec.kind(layer), layer, (site,)))
        return [*groups, LayerGroup("head", 0, (last,))]

    def _travel_dtypes(self, sizes: BucketSizes) -> list[str]:
        kinds = {group.kind for group in self.groups}
        return sorted({sizes.travels_as, *(dtype for kind in kinds for dtype in self._travel(kind, sizes))})

    def _find_travel(self, kind: Kind, sizes: BucketSizes) -> list[str]:
        """Return the dtype in which each tensor of a kind of group travels."""

        def dtype_of(fused: Fused) -> str:
            if fused.dtype == FP8:
                return FP8
            is_wide = any(piece.hf in self._wide for piece in fused.pieces) or sizes.trained_dtype == "float32"
            is_wide = is_wide or fused.name.endswith(SCALE)
            goes_wide = (fused.dtype or sizes.dtype) == "float32"
            return "float32" if is_wide and goes_wide else sizes.travels_as

        return [dtype_of(fused) for fused, _ in self._regions(kind, 0, None)]

    def _order(self, worker: int) -> tuple[int, int]:
        """Return the stage of the trainer whose tensors a worker takes first, and its stage in its engine."""
        host = self.rollout.hosts[worker]
        return self._stage(self._leader_of.get(host, host)), self._place(worker).stage

    def _buckets(
        self, order: tuple[int, int], sizes: BucketSizes, dtype: str, rank: int = 0
    ) -> list[list[PlannedTensor]]:
        """Return the buckets of the workers of an engine's stage on devices of a trainer's stage: first the tensors
        that these devices hold, then the next stage's, and so on.

        At any time each stage serves different workers. In a common order, all workers would wait for the first stage,
        then for the second.
        """
        buckets: list[list[PlannedTensor]] = [[]]
        (stage, engine_stage), end = order, 0
        for number in sorted(
            range(len(self.groups)), key=lambda n: (self.groups[n].sites[0].stage - stage) % self.mesh.pp
        ):
            group = self.groups[number]
            travel = self._travel(group.kind, sizes)
            held = self._regions(group.kind, rank, None) if engine_stage in self._engine_stages[number] else ()
            for index, (fused, _) in enumerate(held):
                if travel[index] != dtype:
                    continue
                num_bytes = sizes.num_bytes(fused)
                start = round_up(end, sizes.alignment)
                if start + num_bytes > sizes.slot_bytes and buckets[-1]:
                    buckets.append([])
                    start = 0
                name = _name(fused, group, self.spec.layer_prefix)
                buckets[-1].append(PlannedTensor(name, fused, start, number, index))
                end = start + num_bytes
        return buckets

    def _stage(self, rank: int) -> int:
        """Return the stage that a rank holds or, for a receiver, a stage to begin with."""
        return rank // self._ranks_per_stage % self.mesh.pp

    # --- transfers --------------------------------------------------------------------------------------------

    def _received(
        self, worker: int, places: dict[tuple[int, int], tuple[int, int]]
    ) -> Iterator[tuple[int, int, Transfer]]:
        """Yield a worker's transfers: bucket, source, and transfer.

        Receiver and sender compute the same order, so a message needs no table of contents.
        """
        # Four ranks of tp 2 with an engine of tp 1 on each device: worker 0, on rank 0's device, gets a layer's qkv in
        # two regions. The region of tp 0 is rank 0's own; ranks 1 and 3 have that of tp 1, and take turns by layer.
        rank = self._place(worker).rank
        for number, group in enumerate(self.groups):
            sites = {site.stage: site for site in group.sites}
            for index, (_, regions) in enumerate(self._regions(group.kind, rank, None)):
                if (number, index) not in places:  # it travels in another dtype, or another stage has it
                    continue
                bucket, tensor = places[number, index]
                for owner, region in regions.items():
                    source = self._copies(owner, tuple(sites)).source(worker, number)
                    yield bucket, source, Transfer(sites[self._stage(source)], tensor, region)

    def _sent(
        self, rank: int, places: dict[tuple[int, int], dict[tuple[int, int], tuple[int, int]]]
    ) -> Iterator[tuple[int, int, Transfer]]:
        """Yield what a rank sends to workers on other devices: bucket, rank on the worker's device, and transfer."""
        stage, owners = self._stage(rank), self._owners(rank)
        for number, group in enumerate(self.groups):
            sites = {site.stage: site for site in group.sites}
            for position in self._positions[number] if stage in sites else ():
                for index, (_, regions) in enumerate(self._regions(group.kind, self._place(position).rank, owners)):
                    for owner, region in regions.items():
                        for worker in self._copies(owner, tuple(sites)).receivers(rank, position, number):
                            if place := places[self._order(worker)].get((number, index)):
                                yield place[0], self.rollout.hosts[worker], Transfer(sites[stage], place[1], region)

    def _owners(self, rank: int) -> frozenset[ShardOwner]:
        at = self.mesh.coordinates(rank)
        ranks = ((False, 0, at.tp), (True, at.ep, at.etp))
        return frozenset(ShardOwner(expert, ep, tp) for expert, ep, own in ranks for tp in (own, None))

    def _find_copies(self, owner: ShardOwner, stages: tuple[int, ...]) -> Copies:
        return Copies((rank for stage in stages for rank in owner.ranks(self.mesh, stage)), self._workers)


def _places(buckets: list[list[PlannedTensor]]) -> dict[tuple[int, int], tuple[int, int]]:
    """Return bucket and position of each tensor, by its group and number."""
    return {
        (tensor.group, tensor.number): (bucket, position)
        for bucket, tensors in enumerate(buckets)
        for position, tensor in enumerate(tensors)
    }


def _name(fused: Fused, group: LayerGroup, prefix: str) -> str:
    """Return the name of an example layer's tensor in another group."""
    if group.kind in ("embedding", "head"):
        return fused.name
    return f"{prefix}{group.layer}.{fused.name.removeprefix(prefix).split('.', 1)[1]}"
