"""Slices of Megatron's parameters that make up each fused tensor, computed once per kind of layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple, TypeAlias

from mrl.config.mesh import Mesh
from mrl.config.schema import ParallelConfig
from mrl.models.families import FAMILIES
from mrl.models.fp8_scales import SCALE, Fp8Form, is_on_blocks, scale_pieces
from mrl.models.parameters import Parameter, Piece, RowRange
from mrl.models.regions import Region, intersection, moved, num_elements
from mrl.models.rollout_table import (
    EngineSizes,
    Fused,
    embedding_tensors,
    head_tensors,
    is_linear,
    layer_tensors,
    module_in_layer,
)
from mrl.models.spec import ModelSpec, MoeSpec
from mrl.models.table import EMBEDDING, LM_HEAD, NORM, vocabulary_parameter

Kind: TypeAlias = Hashable
"""Kind of a group: a kind of layer, "embedding", or "head" for the parameters after the layers."""


class ShardOwner(NamedTuple):
    """Ranks of a stage with the same data, by their place in tp or, for experts, in ep and etp; None means all."""

    expert: bool
    ep: int
    tp: int | None

    def ranks(self, mesh: Mesh, stage: int) -> Sequence[int]:
        """Return the ranks of a stage that have the data."""
        size = mesh.world_size // mesh.pp
        start, stop = stage * size, (stage + 1) * size
        if not self.expert:
            return range(start, stop) if self.tp is None else range(start + self.tp, stop, mesh.tp)
        if self.tp is not None:
            return range(start + self.tp + mesh.etp * self.ep, stop, mesh.etp * mesh.ep)
        return [rank for rank in range(start, stop) if (rank - start) // mesh.etp % mesh.ep == self.ep]


class RegionCopy(NamedTuple):
    """A box of a Megatron parameter that is one box of a fused tensor, in every layer of a kind."""

    name: str  # the part after the prefix of a site
    source: Region
    target: Region


class ShardRegion(NamedTuple):
    """All boxes of a fused tensor that the same ranks hold."""

    copies: tuple[RegionCopy, ...]
    num_elements: int


FusedRegions = tuple[tuple[Fused, dict[ShardOwner, ShardRegion]], ...]
"""The fused tensors of a kind of group, with their regions."""


class ShardIntersections:
    """Cached intersections of the model's two tables: training shards and engine tensors."""

    def __init__(self, spec: ModelSpec, layout: ParallelConfig, sizes: EngineSizes) -> None:
        self.spec, self.layout, self.sizes = spec, layout, sizes
        self._examples = {kind: layers[0] for kind, layers in spec.layers_by_kind().items()}
        self.regions = cache(self._find_regions)
        self._held = cache(lambda kind: tuple(_with_scales(self._find_held(kind), sizes.fp8)))

    def unaligned(self) -> frozenset[str]:
        """Return the modules of layers of which a slice, on either side, is not made of whole blocks."""
        return frozenset(
            module_in_layer(fused.name)
            for kind in self._examples
            for tp_rank in range(self.sizes.tp * self.sizes.dp)
            for fused, regions in self.regions(kind, tp_rank, None)
            if is_linear(fused)
            for region in regions.values()
            for copy in region.copies
            if not (is_on_blocks(copy.source) and is_on_blocks(copy.target))
        )

    def _find_regions(self, kind: Kind, tp_rank: int, owners: frozenset[ShardOwner] | None) -> FusedRegions:
        """Return what a tensor rank of an engine needs, optionally only the parts that some owners have."""
        pieces_by_name: dict[str, list[tuple[ShardOwner, str, Region, Region]]] = defaultdict(list)
        for owner, name, shard in self._held(kind):
            if owners is None or owner in owners:
                for piece in shard:
                    pieces_by_name[piece.hf].append((owner, name, piece.source, piece.target))
        regions_by_tensor = []
        for fused in self._needed(kind, tp_rank):
            copies: dict[ShardOwner, list[RegionCopy]] = defaultdict(list)
            for piece in fused.pieces:
                for owner, name, source, target in pieces_by_name.get(piece.hf, ()):
                    if (box := intersection(piece.source, source)) is not None:
                        copy = RegionCopy(name, moved(box, source, target), moved(box, piece.source, piece.target))
                        copies[owner].append(copy)
            regions = {
                owner: ShardRegion(tuple(owned), sum(num_elements(region_copy.target) for region_copy in owned))
                for owner, owned in copies.items()
            }
            if owners is None:
                covered = sum(region.num_elements for region in regions.values())
                needed = sum(num_elements(piece.target) for piece in fused.pieces)
                assert covered == needed, f"{fused.name}: {covered} of {needed} elements have a source"
            regions_by_tensor.append((fused, regions))
        return tuple(regions_by_tensor)

    def _needed(self, kind: Kind, tp_rank: int) -> Iterator[Fused]:
        spec, sizes = self.spec, self.sizes
        if kind == "embedding":
            return embedding_tensors(spec, sizes, tp_rank)
        if kind == "head":
            return head_tensors(spec, sizes, tp_rank)
        return layer_tensors(spec, sizes, tp_rank, self._examples[kind])

    def _find_held(self, kind: Kind) -> Iterator[tuple[ShardOwner, str, Sequence[Piece]]]:
        """Yield each local parameter at each place of a stage, with the pieces of Hugging Face tensors in it."""
        spec, family = self.spec, FAMILIES[self.spec.family]
        if kind == "embedding":
            yield from self._split(vocabulary_parameter("weight", EMBEDDING, spec))
        elif kind == "head":
            yield from self._split(Parameter("decoder.final_layernorm.weight", ((RowRange(NORM, 0, spec.hidden),),)))
            if not spec.tied:
                yield from self._split(vocabulary_parameter("output_layer.weight", LM_HEAD, spec))
        else:
            layer = self._examples[kind]
            for parameter in family.parameters(spec, layer):
                yield from self._split(parameter)
            if spec.moe and spec.has_experts(layer):
                yield from self._experts(spec.moe, layer)

    def _experts(self, moe: MoeSpec, layer: int) -> Iterator[tuple[ShardOwner, str, Sequence[Piece]]]:
        num_local = moe.num_experts // self.layout.ep
        for expert in range(moe.num_experts):
            ep, local = divmod(expert, num_local)
            for parameter in FAMILIES[self.spec.family].expert(self.spec, layer, expert):
                assert parameter.split or self.layout.etp == 1, f"{parameter.name} of an expert is not split over etp"
                for etp in range(self.layout.etp):
                    name = f"mlp.experts.local_experts.{local}.{parameter.name}"
                    yield ShardOwner(True, ep, etp), name, parameter.share(etp, self.layout.etp)[1]

    def _split(self, parameter: Parameter) -> Iterator[tuple[ShardOwner, str, Sequence[Piece]]]:
        if parameter.split is None:
            yield ShardOwner(False, 0, None), parameter.name, parameter.share(0, 1)[1]
            return
        for tp in range(self.layout.tp):
            yield ShardOwner(False, 0, tp), parameter.name, parameter.share(tp, self.layout.tp)[1]


HeldPieces = tuple[ShardOwner, str, Sequence[Piece]]


def _with_scales(held: Iterable[HeldPieces], form: Fp8Form | None) -> Iterator[HeldPieces]:
    """Yield local parameters, and after them their scales. Ranks that split columns all hold the scales of the rows."""
    owners: dict[tuple[bool, int, str, tuple[Piece, ...]], list[int | None]] = defaultdict(list)
    for owner, name, pieces in held:
        yield owner, name, pieces
        if form is not None and (scales := scale_pieces(pieces, form)):
            owners[owner.expert, owner.ep, name, scales].append(owner.tp)
    for (expert, ep, name, scales), ranks in owners.items():
        yield ShardOwner(expert, ep, ranks[0] if len(ranks) == 1 else None), name + SCALE, scales
