"""Kinds of ranks: ranks of one kind hold tensors of the same shapes, so that one of them stands for all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mrl.config.arithmetic import role_mesh
from mrl.config.sft import AnyConfig
from mrl.errors import counted
from mrl.models.layout import layers_of_chunk
from mrl.models.spec import ModelSpec


@dataclass(frozen=True)
class RankKind:
    """A rank of a role, and the pipeline stages that it represents."""

    role: str
    rank: int
    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    """All ranks that it represents."""

    def __str__(self) -> str:
        first, last = self.stages[0], self.stages[-1]
        stages = f"stage {first}" if first == last else f"stages {first} to {last}"
        return f"{self.role}, rank {self.rank} for the {counted(len(self.ranks), 'rank')} of {stages}"


def rank_kinds(config: AnyConfig, role: str, spec: ModelSpec) -> Iterator[RankKind]:
    """Yield the kinds of ranks of a role.

    Ranks that differ only in tp, cp, dp and ep have equal shares; the first of them owns the most optimizer state.
    Stages with the same kinds of layers differ in the micro-batches that they keep: the first keeps the most.
    """
    mesh, layout = role_mesh(config, role), config.model_roles()[role].parallel
    stages_of: dict[tuple[object, ...], list[int]] = {}
    for stage in range(layout.pp):
        chunks = [layers_of_chunk(layout, spec.num_layers, stage, chunk) for chunk in range(layout.vpp)]
        layers = tuple(tuple(spec.kind(layer) for layer in chunk) for chunk in chunks)
        stages_of.setdefault((layers, stage == 0, stage == layout.pp - 1), []).append(stage)
    num = mesh.world_size // layout.pp
    for stages in stages_of.values():
        ranks = [rank for stage in stages for rank in range(stage * num, (stage + 1) * num)]
        yield RankKind(role, ranks[0], tuple(stages), tuple(ranks))
