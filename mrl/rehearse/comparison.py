"""Rehearsed memory next to the plan's, phase by phase."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mrl.config.arithmetic import has_own_rollout_pool
from mrl.config.schema import Config
from mrl.plan.assumptions import GIB, RESERVE, UNUSED
from mrl.plan.engine_memory import engine_memory
from mrl.plan.memory import Item, role_stages, scoring_phase
from mrl.plan.plan_input import Planned
from mrl.rehearse.processes import Rehearsed
from mrl.rehearse.subject import HALF
from mrl.rehearse.timeline import PhaseMemory

SHARE, BYTES = 0.03, int(0.3 * GIB)
"""A difference between plan and rehearsal counts if it is larger than this share and than these bytes."""

_USED = 0.99


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


def compared(subject: Planned[Any], done: Rehearsed, *, has_full_batches: bool = True) -> Iterator[Compared]:
    """Yield the phases with the plan's figures, which are for full micro-batches."""
    planned = planned_phases(subject, done.kind.role, done.kind.stages[0]) if has_full_batches else {}
    for phase in done.phases:
        yield Compared(phase, planned.get(phase.name))


def largest_budget(subject: Planned[Any], done: Rehearsed) -> int | None:
    """Return about the largest `max_tokens_per_device` with which the role fits, or None if no second update shows what
    a token takes. Memory grows almost evenly with the tokens of a micro-batch, so one percent is left free."""
    by_name = {phase.name: phase for phase in done.phases}
    if (half := by_name.get(HALF)) is None:
        return None
    full, role = by_name[f"train {done.kind.role}"], done.kind.role
    per_token = 2 * (full.peak - half.peak) / done.tokens
    left = _USED * subject.hardware.memory_bytes - process_of(subject, done) - full.peak
    budget: int = subject.config.model_roles()[role].max_tokens_per_device
    return int(budget + left / per_token / subject.config.model_roles()[role].parallel.cp) // 256 * 256


def process_of(subject: Planned[Any], done: Rehearsed) -> int:
    """Return the memory of the process itself, which a rehearsal does not see."""
    return role_stages(subject, done.kind.role)[done.kind.stages[0]].process


def planned_phases(subject: Planned[Any], role: str, stage: int) -> Mapping[str, int]:
    """Return the plan's bytes of each phase of a rank, without assumed memory and other roles."""
    at_stage = role_stages(subject, role)[stage]
    held = at_stage.weights.total
    phases = {f"build {role}": _tensors(at_stage.build()), scoring_phase(role): held + _tensors(at_stage.score)}
    if at_stage.train:
        phases[f"train {role}"] = held + _tensors(at_stage.train)
    if isinstance(subject.config, Config) and role == "actor":
        engine = engine_memory(subject.config, subject.specs[role], subject.hardware)
        added = engine.message_bytes if has_own_rollout_pool(subject.config) else engine.bucket_bytes
        phases["send weights"] = _tensors(at_stage.held("parameters")) + added
    return phases


def _tensors(items: Iterable[Item]) -> int:
    return sum(item.num_bytes for item in items if item.what not in (RESERVE, UNUSED))
