"""Rehearsed memory next to the plan's, phase by phase."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mrl.plan.assumptions import GIB, RESERVE, UNUSED
from mrl.plan.memory import Item, role_stages, scoring_phase
from mrl.plan.plan_input import Planned
from mrl.rehearse.timeline import PhaseMemory

SHARE, BYTES = 0.03, int(0.3 * GIB)
"""A difference between plan and rehearsal counts if it is larger than this share and than these bytes."""


@dataclass(frozen=True)
class Compared:
    """One phase of a rank with the plan's figure; None if the plan has no such phase."""

    memory: PhaseMemory
    planned: int | None

    @property
    def difference(self) -> int:
        return 0 if self.planned is None else self.memory.peak - self.planned

    @property
    def differs(self) -> bool:
        return self.planned is not None and abs(self.difference) > max(BYTES, SHARE * self.planned)


def compared(subject: Planned[Any], role: str, stage: int, phases: tuple[PhaseMemory, ...]) -> Iterator[Compared]:
    planned = planned_phases(subject, role, stage)
    for phase in phases:
        yield Compared(phase, planned.get(phase.name))


def planned_phases(subject: Planned[Any], role: str, stage: int) -> Mapping[str, int]:
    """Return the plan's bytes of each phase of a rank, without assumed memory and other roles."""
    at_stage = role_stages(subject, role)[stage]
    held = at_stage.weights.total
    phases = {f"build {role}": _tensors(at_stage.build()), scoring_phase(role): held + _tensors(at_stage.score)}
    if at_stage.train:
        phases[f"train {role}"] = held + _tensors(at_stage.train)
    return phases


def _tensors(items: Iterable[Item]) -> int:
    return sum(item.num_bytes for item in items if item.what not in (RESERVE, UNUSED))
