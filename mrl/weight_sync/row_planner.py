"""Plan of a weight update from a trainer that torch shards: each rank holds rows of every tensor, and whole experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mrl.config.mesh import Mesh
from mrl.config.schema import ParallelConfig
from mrl.models.families import FAMILIES
from mrl.models.fp8_scales import Fp8Form
from mrl.models.layout import RankPlace
from mrl.models.open_model import OpenSpec
from mrl.models.parameters import Piece
from mrl.models.regions import Shape
from mrl.models.rollout_table import EngineSizes
from mrl.models.row_shards import row_shards
from mrl.models.spec import ModelSpec
from mrl.models.table import EMBEDDING, LM_HEAD, NORM, Shard, dense_shards, hf_tensors
from mrl.weight_sync.intersections import Kind, ShardIntersections, ShardOwner
from mrl.weight_sync.planner import LayerGroup, ParameterSite, ReshardPlanner
from mrl.weight_sync.rollout_layout import RolloutLayout

if TYPE_CHECKING:
    from mrl.weight_sync.resharder import WeightSyncSpec  # loads torch


def planner_of(spec: ModelSpec, layout: ParallelConfig, num_trainers: int, route: WeightSyncSpec) -> ReshardPlanner:
    """Return the planner of a trainer with that many ranks, for either strategy."""
    if route.shard_size is not None:
        return RowPlanner(spec, num_trainers, route.shard_size, route.layout)
    mesh = Mesh(num_trainers, tp=layout.tp, cp=layout.cp, pp=layout.pp, ep=layout.ep, etp=layout.etp)
    return ReshardPlanner(spec, layout, mesh, route.layout)


def sizes_for_fp8(
    spec: ModelSpec, layout: ParallelConfig, shards: int | None, sizes: EngineSizes, form: Fp8Form
) -> EngineSizes:
    """Return the split of engines that get their weights in FP8 from a trainer of either strategy."""
    plain = ShardIntersections(spec, layout, sizes) if shards is None else RowIntersections(spec, shards, sizes)
    return replace(sizes, fp8=form, unaligned=plain.unaligned() if form == "block" else frozenset())


class RowPlanner(ReshardPlanner):
    """Ranks are numbered as the tensor ranks of a layout of one stage: neighbors share a copy of the model."""

    def __init__(self, spec: ModelSpec, num_trainers: int, shard_size: int, rollout: RolloutLayout) -> None:
        self._size = shard_size
        mesh, intersections = Mesh(num_trainers, tp=shard_size), RowIntersections(spec, shard_size, rollout.sizes)
        super().__init__(spec, ParallelConfig(), mesh, rollout, intersections)

    def shards(self, rank: int) -> list[Shard]:
        """Return the shards that a rank holds; none if it is a receiver."""
        if rank >= self.mesh.world_size:
            return []
        tensors = hf_tensors(self.spec, "lm")
        return list(row_shards(tensors, untrained_tensors(self.spec), rank % self._size, self._size))

    def _groups(self) -> list[LayerGroup]:
        everything = (ParameterSite(0, 0, ""),)
        layers = [
            LayerGroup(self.spec.kind(layer), layer, (ParameterSite(0, 0, f"{self.spec.layer_prefix}{layer}."),))
            for layer in range(self.spec.num_layers)
        ]
        return [LayerGroup("embedding", 0, everything), *layers, LayerGroup("head", 0, everything)]


class RowIntersections(ShardIntersections):
    def __init__(self, spec: ModelSpec, shard_size: int, sizes: EngineSizes) -> None:
        self._size = shard_size
        super().__init__(spec, ParallelConfig(), sizes)

    def _find_held(self, kind: Kind) -> Iterator[tuple[ShardOwner, str, Sequence[Piece]]]:
        """Yield each tensor of the files at each rank of a copy, with the box of it there."""
        tensors, prefix = self._tensors(kind)
        untrained = untrained_tensors(self.spec) & tensors.keys()
        for shard in row_shards({name: tensors[name] for name in untrained}, untrained, 0, 1):
            yield ShardOwner(False, 0, None), shard.name.removeprefix(prefix), shard.pieces
        trained = {name: shape for name, shape in tensors.items() if name not in untrained}
        for rank in range(self._size):
            for shard in row_shards(trained, (), rank, self._size):
                yield ShardOwner(False, 0, rank), shard.name.removeprefix(prefix), shard.pieces

    def _tensors(self, kind: Kind) -> tuple[dict[str, Shape], str]:
        """Return the tensors of a kind of group, and the beginning of their names that other layers do not share."""
        spec = self.spec
        if isinstance(spec, OpenSpec) and kind in ("embedding", "head"):
            return (spec.outer_tensors() if kind == "embedding" else {}), ""
        if kind == "embedding":
            return {EMBEDDING: (spec.vocab, spec.hidden)}, ""
        if kind == "head":
            return {NORM: (spec.hidden,)} | ({} if spec.tied else {LM_HEAD: (spec.vocab, spec.hidden)}), ""
        layer = self._examples[kind]
        return FAMILIES[spec.family].tensors(spec, layer), f"{spec.layer_prefix}{layer}."


def untrained_tensors(spec: ModelSpec) -> frozenset[str]:
    """Return the tensors of the files that are buffers of the model."""
    if isinstance(spec, OpenSpec):
        return spec.untrained()
    shards = dense_shards(spec, ParallelConfig(), RankPlace(), "lm")
    return frozenset(piece.hf for shard in shards if not shard.trained for piece in shard.pieces)
