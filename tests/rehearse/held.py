"""The plan compared with the rehearsal: all ranks of a role, and the phase that differs most."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from mrl.config.resolved.load import load_any_config
from mrl.plan.assumptions import GIB
from mrl.plan.plan_input import make_plan_input
from mrl.rehearse.comparison import Compared, compared
from mrl.rehearse.processes import rehearse
from mrl.rehearse.rank_kinds import RankKind, rank_kinds
from mrl.rehearse.subject import Request

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
PRESETS = sorted(path.stem for path in CONFIGS.glob("*.yaml") if not path.stem.startswith("laptop"))
"""The presets for GPUs."""


@dataclass(frozen=True)
class Held:
    """A kind of ranks with its phases next to the plan's."""

    kind: RankKind
    phases: tuple[Compared, ...]
    seconds: float

    @property
    def planned(self) -> tuple[Compared, ...]:
        """Phases of which the plan has a figure."""
        return tuple(phase for phase in self.phases if phase.planned is not None)

    @cached_property
    def fullest(self) -> Compared:
        return max(self.planned, key=lambda phase: phase.memory.peak)

    @cached_property
    def furthest(self) -> Compared:
        """The phase that differs most from the plan."""
        return max(self.planned, key=lambda phase: abs(phase.difference))

    def after(self, name: str) -> int:
        """Return the bytes that stay after a phase."""
        return next(phase.memory.after for phase in self.phases if phase.memory.name == name)

    def differences(self) -> list[str]:
        """Describe each phase that differs from the plan by more than is allowed."""
        return [
            f"{self.kind}: `{phase.memory.name}` needs {phase.memory.peak / GIB:.2f} GiB, "
            f"{phase.difference / GIB:+.2f} against the plan"
            for phase in self.planned
            if phase.differs
        ]


def roles_of(path: Path) -> list[str]:
    return list(make_plan_input(load_any_config(str(path), []), None).specs)


def held(path: Path, role: str, overrides: tuple[str, ...] = ()) -> list[Held]:
    """Rehearse every kind of rank of a role, and compare it with the plan."""
    subject = make_plan_input(load_any_config(str(path), list(overrides)), None)
    kinds = list(rank_kinds(subject.config, role, subject.specs[role]))
    done = rehearse(kinds, Request(str(path), list(overrides)), lambda _: None)
    return [Held(rank.kind, tuple(compared(subject, rank)), rank.seconds) for rank in done]
