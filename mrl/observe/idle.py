"""Idle time of each process of a step, by its cause, and the critical path of the step.

A process is idle while its working thread is in no span. Each moment of idleness gets the first cause of a list that
applies to it, so busy and idle times add up to the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from mrl.observe.intervals import Intervals, common, minus, seconds, union
from mrl.spans import Span

_MOVES = ("offload", "onload", "give_back", "send_weights", "receive_weights", "receive_adapters", "wake", "sleep")
DRIVER, RANK, ENGINE, ENVIRONMENT, REWARD = "driver", "rank", "engine", "environment", "reward"
MOVES, ENVIRONMENTS, REWARDS = "weights and memory move", "environments work", "rewards are computed"
GENERATION, OTHERS = "engines generate", "only other engines generate"
SAVES, CALLS, DRIVES, ENDED = "a checkpoint is saved", "calls and their answers travel", "the driver works", "has ended"
STARTS = "an engine starts"
ENDED_PROCESS = "its process has ended"
NOTHING, SLOWER = "nothing to do", "slower ranks of its role work"


@dataclass
class Row:
    """A process with its spans, in nanoseconds of the driver's clock."""

    name: str
    kind: str
    role: str
    spans: list[Span]
    thread: str = ""
    """Thread whose spans count as work; empty for all."""
    problem: str = ""

    def within(self, window: tuple[int, int], names: Sequence[str] = ()) -> Intervals:
        """Return the times of the working thread's spans, or of the spans with these names."""
        chosen = (span for span in self.spans if self.thread in ("", span.thread) and (not names or span.name in names))
        return common(union((span.begin, span.end or window[1]) for span in chosen), [window])


@dataclass(frozen=True)
class Cause:
    """Why a process is idle, and when this reason applies."""

    what: str
    when: Intervals
    counts: bool = True
    """Whether the device is idle: not while another process of the same device works."""


@dataclass
class StepTimes:
    """All processes during one step. `pools` are the pools of roles, including `rollout`."""

    step: int
    window: tuple[int, int]
    rows: Sequence[Row]
    pools: Mapping[str, str]
    idle: dict[str, dict[str, Intervals]] = field(default_factory=dict)
    """Process -> cause -> times."""

    def __post_init__(self) -> None:
        for row in self.rows:
            everything: Intervals = [self.window]
            gaps = self._waits if row.kind == DRIVER else minus(everything, self.busy[row.name])
            parts = _attributed(gaps, self.causes(row))
            if row.kind == DRIVER:
                parts.pop(DRIVES, None)
            self.idle[row.name] = parts

    @property
    def driver(self) -> Row:
        return next(row for row in self.rows if row.kind == DRIVER)

    @cached_property
    def busy(self) -> dict[str, Intervals]:
        """Busy times of each process except the driver."""
        return {row.name: row.within(self.window) for row in self.rows if row.kind != DRIVER}

    def busy_of(self, kind: str, role: str = "") -> Intervals:
        """Return when any process of a kind works, or any process of one role."""
        rows = [row for row in self.rows if row.kind == kind and role in ("", row.role)]
        return union(*(self.busy[row.name] for row in rows))

    def calls(self, *, main: bool = False) -> list[Span]:
        """Return the driver's calls of workers; with `main`, only the calls for which its main thread waits."""
        return [s for s in self.driver.spans if "." in s.name and (not main or s.thread == "MainThread")]

    @cached_property
    def phases(self) -> list[Span]:
        """Phases of the driver's main thread within the step, in order."""
        spans = [s for s in self.driver.spans if s.thread == "MainThread" and "." not in s.name]
        inside = [s for s in spans if not s.name.startswith("step ") and s.name != "wait for rewards"]
        return [s for s in inside if s.begin < self.window[1] and (s.end or self.window[1]) > self.window[0]]

    @cached_property
    def _waits(self) -> Intervals:
        """When the driver's main thread may be waiting: in calls, and in the phase that generates."""
        calls = self._times(self.calls(main=True))
        return union(calls, self._times([s for s in self.phases if s.name in ("rollout", "validation")]))

    def causes(self, row: Row) -> list[Cause]:
        """Return the causes for which a process may be idle, the first that applies counting."""
        if row.kind in (ENVIRONMENT, REWARD):
            return [Cause(NOTHING, [self.window], counts=False)]
        pool = self.pools.get("rollout" if row.kind == ENGINE else row.role, "")
        engines_share = self.pools.get("rollout") == pool
        rewards = self.driver.within(self.window, ["wait for rewards"])
        causes = [Cause(ENDED, self._after_end(row), counts=False)]
        if row.kind == RANK:
            causes += [Cause(SLOWER, self.busy_of(RANK, row.role))]
        causes += [Cause(MOVES, self._times([s for s in self.calls() if s.name.rpartition(".")[2] in _MOVES]))]
        others = dict.fromkeys(other.role for other in self.rows if other.kind == RANK and other.role != row.role)
        works = [Cause(f"{name} works", self.busy_of(RANK, name), self.pools.get(name, "") != pool) for name in others]
        environments = Cause(ENVIRONMENTS, self.busy_of(ENVIRONMENT))
        if row.kind == ENGINE:
            causes += [environments, Cause(OTHERS, self.busy_of(ENGINE)), Cause(REWARDS, rewards), *works]
        else:  # engines may generate ahead while another role works
            generation = Cause(GENERATION, self.busy_of(ENGINE), counts=not engines_share)
            causes += [*works, generation, environments, Cause(REWARDS, rewards)]
        starts = self._times([s for s in self.driver.spans if s.name.startswith("start rollout-")])
        causes += [Cause(SAVES, self.driver.within(self.window, ["save"])), Cause(CALLS, self._times(self.calls()))]
        return [*causes, Cause(STARTS, starts), Cause(DRIVES, [self.window])]

    def critical_path(self) -> Iterator[tuple[str, str, float]]:
        """Yield phase, activity and seconds that the driver's main thread waited for it or worked, in order."""
        left: Intervals = [self.window]
        innermost = sorted(self.phases, key=lambda s: (s.begin, -(s.end or self.window[1])), reverse=True)
        parts: list[tuple[int, str, str, float]] = []
        for phase in innermost:  # an inner phase begins after the one around it
            times = common(left, self._times([phase]))
            left = minus(left, times)
            parts += self._activities(phase.name, times)
        parts += self._activities("between phases", left)
        merged: dict[tuple[str, str], float] = {}
        for _, phase_name, activity, length in sorted(parts):
            merged[phase_name, activity] = merged.get((phase_name, activity), 0.0) + length
        for (phase_name, activity), length in merged.items():
            yield phase_name, activity, length

    def _activities(self, phase: str, times: Intervals) -> Iterator[tuple[int, str, str, float]]:
        causes = [Cause(name, when) for name, when in self._named_calls(times)]
        engines = [row for row in self.rows if row.kind == ENGINE]
        last = max(
            engines, key=lambda row: max((e for _, e in common(self.busy[row.name], times)), default=0), default=None
        )
        if last is not None:
            causes += [Cause(f"{last.name} generates, the last to finish", self.busy[last.name])]
        causes += self.causes(self.driver)
        for what, when in _attributed(times, causes).items():
            yield when[0][0], phase, what, seconds(when)

    def _named_calls(self, times: Intervals) -> Iterator[tuple[str, Intervals]]:
        """Yield the calls that the main thread waits for in these times, with the rank that worked longest."""
        calls = self.calls(main=True)
        for name in dict.fromkeys(call.name for call in calls):
            when = common(self._times([call for call in calls if call.name == name]), times)
            role = name.rpartition(".")[0]
            ranks = {row.name: seconds(common(self.busy[row.name], when)) for row in self.rows if row.role == role}
            slowest = max(ranks, key=ranks.__getitem__, default="")
            yield f"{name}{f', longest on {slowest}' if len(ranks) > 1 else ''}", when

    def _after_end(self, row: Row) -> Intervals:
        last = max((s.end or s.begin for s in row.spans), default=self.window[0])
        return common([(last, self.window[1])], [self.window]) if row.problem.startswith(ENDED_PROCESS) else []

    def _times(self, spans: Sequence[Span]) -> Intervals:
        return common(union((s.begin, s.end or self.window[1]) for s in spans), [self.window])


def _attributed(gaps: Intervals, causes: Sequence[Cause]) -> dict[str, Intervals]:
    """Return the gaps by their first cause that applies."""
    parts: dict[str, Intervals] = {}
    for cause in causes:
        if found := common(gaps, cause.when):
            parts[cause.what] = union(parts.get(cause.what, []), found)
            gaps = minus(gaps, found)
    return parts
