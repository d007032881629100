"""The weights that a reshard brings to each rank of an engine, compared with the work of vLLM's own loader."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

from mrl.config.arithmetic import has_own_rollout_pool, held_dtype, num_engines, role_mesh, shard_size
from mrl.config.schema import Config
from mrl.errors import MrlError, counted
from mrl.models.parameters import Piece
from mrl.models.regions import Shape, intersection, moved, tiling_problems
from mrl.models.rollout_table import EngineSizes, Fused
from mrl.models.spec import ModelSpec
from mrl.plan.memory import gib
from mrl.rollout.quantization import shares_scales
from mrl.weight_sync.ipc import ALIGNMENT_BYTES
from mrl.weight_sync.planner import BucketSizes, ReshardPlanner
from mrl.weight_sync.rollout_layout import RolloutLayout
from mrl.weight_sync.row_planner import RowPlanner

ENGINE_ROLE = "rollout"
"""Role whose rehearsal is that of an engine."""
_MOST_SHOWN = 10


class RehearsalError(MrlError):
    """The rehearsed code failed on a rank, or vLLM's model has other parameters than the plan."""


@dataclass(frozen=True)
class ParameterDifference:
    """A difference in one parameter of a rank of an engine."""

    rank: int
    parameter: str
    planned: str
    vllm: str

    def __str__(self) -> str:
        return f"rank {self.rank}, {self.parameter}: the plan has {self.planned}, vLLM has {self.vllm}"


@dataclass(frozen=True)
class EngineRanks:
    """Ranks of an engine with as many parameters and bytes. Each of them was built."""

    ranks: tuple[int, ...]
    num_parameters: int
    """Number of named parameters."""
    num_bytes: int
    differences: tuple[ParameterDifference, ...]


@dataclass(frozen=True)
class EngineReport:
    """All ranks of an engine."""

    model_class: str
    kinds: tuple[EngineRanks, ...]
    not_compared: str
    """Reason why ranks were not built or not compared; empty if all were."""
    seconds: float

    def lines(self) -> Iterator[str]:
        """Yield what the reader sees: a line for each kind of rank, its differences, and what was not compared."""
        for kind in self.kinds:
            ranks = f"ranks {', '.join(map(str, kind.ranks))}" if len(kind.ranks) > 1 else f"rank {kind.ranks[0]}"
            held = f"{kind.num_parameters} parameters, {gib(kind.num_bytes)}"
            result = "not compared" if self.not_compared else "no differences"
            if kind.differences:
                result = counted(len(kind.differences), "difference")
            yield f"{ENGINE_ROLE}, {ranks} of an engine: {self.model_class}, {held}, {result}"
            yield from (f"  {difference}" for difference in kind.differences[:_MOST_SHOWN])
        if self.not_compared:
            yield f"{ENGINE_ROLE}: not compared: {self.not_compared}"
        yield f"  {self.seconds:.0f} s"

    def check(self) -> None:
        """Raise an error if the plan does not fill the parameters of every rank as vLLM's loader does."""
        if found := [difference for kind in self.kinds for difference in kind.differences]:
            raise RehearsalError(
                f"{counted(len(found), 'difference')} from vLLM's {self.model_class}; {found[0]}",
                where=ENGINE_ROLE,
                fix="install the vLLM of requirements-cuda.txt; with that version, this is a bug in "
                "mrl/models/rollout_table.py or in the planner of mrl/weight_sync",
            )


def rollout_layout(config: Config, spec: ModelSpec) -> RolloutLayout:
    """Return the engines of a run, on the actor's devices or on devices after them, filled node by node."""
    num_trainers = role_mesh(config, "actor").world_size
    first = num_trainers if has_own_rollout_pool(config) else 0
    hosts = range(first, first + num_engines(config) * config.rollout.num_devices)
    nodes = tuple(rank // config.cluster.devices_per_node for rank in range(max(num_trainers, hosts.stop)))
    sizes, in_step = EngineSizes.of(config.rollout, spec), shares_scales(config.rollout)
    return RolloutLayout(sizes, tuple(hosts), nodes, in_step=in_step)


class PlannedWeights:
    """The weights that the reshard of a configuration brings to the workers of its first engine."""

    def __init__(self, config: Config, spec: ModelSpec, dtype: str) -> None:
        mesh, size, engines = role_mesh(config, "actor"), shard_size(config, "actor"), rollout_layout(config, spec)
        if size is None:
            self._planner = ReshardPlanner(spec, config.actor.parallel, mesh, engines)
        else:
            self._planner = RowPlanner(spec, mesh.world_size, size, engines)
        self._sizes = BucketSizes(config.sync.bucket_bytes, dtype, held_dtype(config.actor), ALIGNMENT_BYTES)
        self._held = cache(self._pieces_held)

    def of(self, worker: int) -> Iterator[Fused]:
        """Yield the tensors of a worker, each with the slices of Hugging Face tensors that its sources have for it."""
        plan = self._planner.plan(self._planner.rollout.hosts[worker], self._sizes)
        for bucket in plan.buckets:
            pieces: dict[int, list[Piece]] = defaultdict(list)
            for source, transfers in bucket.incoming.items():
                for site, number, region in transfers:
                    for copy in region.copies:
                        for piece in self._held(source)[site.chunk, site.prefix + copy.name]:
                            if box := intersection(copy.source, piece.target):
                                origin = moved(box, piece.target, piece.source)
                                pieces[number].append(Piece(piece.hf, origin, moved(box, copy.source, copy.target)))
            for number, tensor in enumerate(bucket.tensors):
                yield replace(tensor.fused, name=tensor.name, pieces=tuple(pieces[number]))

    def _pieces_held(self, rank: int) -> Mapping[tuple[int, str], tuple[Piece, ...]]:
        """Return the pieces of the parameters of a trainer rank, by chunk and name."""
        return {(shard.chunk, shard.name): shard.pieces for shard in self._planner.shards(rank)}


def differences(rank: int, planned: Iterable[Fused], loaded: Iterable[Fused]) -> Iterator[ParameterDifference]:
    """Yield the differences between the tensors of the plan and the parameters that vLLM's loader fills."""
    tensors, by_name = [*planned], {tensor.name: tensor for tensor in loaded}
    yield from shape_differences(rank, tensors, {name: tensor.shape for name, tensor in by_name.items()})
    for tensor in tensors:
        other = by_name.get(tensor.name)
        if other is not None and other.shape == tensor.shape:
            yield from (ParameterDifference(rank, tensor.name, *pair) for pair in _contents(tensor, other))


def shape_differences(
    rank: int, planned: Iterable[Fused], shapes: Mapping[str, Shape]
) -> Iterator[ParameterDifference]:
    """Yield the differences between the names and shapes of the plan and those of vLLM's parameters."""
    left = dict(shapes)
    for tensor in planned:
        if (shape := left.pop(tensor.name, None)) is None:
            yield ParameterDifference(
                rank, tensor.name, f"shape {list(tensor.shape)}", "no parameter that is still to be filled"
            )
        elif shape != tensor.shape:
            yield ParameterDifference(rank, tensor.name, f"shape {list(tensor.shape)}", f"shape {list(shape)}")
    for name, shape in left.items():
        yield ParameterDifference(rank, name, "nothing", f"shape {list(shape)}")


def _contents(planned: Fused, loaded: Fused) -> Iterator[tuple[str, str]]:
    """Yield where two tensors of the same shape have different contents."""
    boxes = [*(piece.target for piece in planned.pieces), *planned.padding]
    if problem := next(tiling_problems(planned.place, boxes), None):
        yield f"no exact cover: {problem}", "a value for each element"
    copies: dict[str, list[Piece]] = defaultdict(list)
    for piece in loaded.pieces:
        copies[piece.hf].append(piece)
    for piece in planned.pieces:
        if not any(_contains(copy, piece) for copy in copies[piece.hf]):
            yield _shown(piece), ", ".join(map(_shown, copies[piece.hf])) or f"nothing of {piece.hf}"
    for box in planned.padding:
        if not any(intersection(box, zeros) == box for zeros in loaded.padding):
            yield f"zeros at {list(box)}", f"zeros at {list(loaded.padding)}"


def _contains(copy: Piece, piece: Piece) -> bool:
    """Return whether a copy also puts these elements at this place."""
    inside = len(copy.target) == len(piece.target) and intersection(piece.target, copy.target) == piece.target
    return inside and moved(piece.target, copy.target, copy.source) == piece.source


def _shown(piece: Piece) -> str:
    return f"{piece.hf} {list(piece.source)} at {list(piece.target)}"
