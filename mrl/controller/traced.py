"""The processes of a run while a trace is recorded: their files, their clocks, and those without any spans."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from mrl.controller.processes import RankProcess, RankProcesses, ask
from mrl.spans import SPANS, clock_of_host

_TRIES = 9
_ANSWER_S = 5.0
DRIVER, ENDED = "driver", "its process has ended"


@dataclass(frozen=True)
class ClockOffset:
    """Nanoseconds to add to a host's clock to get the driver's, and how far from that the truth may be."""

    offset_ns: int
    uncertainty_ns: int


@dataclass
class TracedProcess:
    """A process of the run, and the file of its spans."""

    role: str
    rank: int
    pid: int
    node: str
    path: Path
    clock: ClockOffset
    thread: str = "MainThread"
    """Thread whose spans count as work."""
    cost_ns: int = 0
    """Nanoseconds that recording took."""
    problem: str = ""
    """Why spans are missing; empty if none are."""

    @property
    def name(self) -> str:
        return self.role if self.role == DRIVER else f"{self.role} rank {self.rank}"

    @property
    def has_ended(self) -> bool:
        return self.problem.startswith(ENDED)

    @property
    def is_engine(self) -> bool:
        return self.role.startswith("rollout-")


class TracedProcesses:
    """The worker groups of a run. Groups that start while a trace is recorded take part from then on."""

    def __init__(self) -> None:
        self._groups: list[tuple[RankProcesses, Collection[int]]] = []
        self._directory: Path | None = None
        self._clocks: dict[str, ClockOffset | None] = {}
        self._started: list[tuple[TracedProcess, RankProcesses, Any]] = []

    def add(self, group: RankProcesses, followers: Collection[int]) -> None:
        """Add a group. `followers` are ranks that answer no call."""
        self._groups.append((group, followers))
        if self._directory is not None:
            self._begin(group, followers)

    def begin(self, directory: Path) -> None:
        """Begin to record in all processes."""
        self._directory, self._started, self._clocks = directory, [], {}
        SPANS.begin(directory / f"{DRIVER}.jsonl")
        self._groups = [entry for entry in self._groups if not entry[0].ended]
        for group, followers in self._groups:
            self._begin(group, followers)

    def end(self, pid: int) -> list[TracedProcess]:
        """Stop recording. Return all processes that took part or should have."""
        assert self._directory is not None, "a trace was begun"
        driver = TracedProcess(DRIVER, 0, pid, "", self._directory / f"{DRIVER}.jsonl", ClockOffset(0, 0))
        driver.cost_ns, driver.problem = SPANS.end(), SPANS.lost and f"its spans were not written: {SPANS.lost}"
        started, self._started, self._directory = self._started, [], None
        asked = [
            (process, group, begun, None if group.ended else group.members[process.rank].actor.trace.remote(None))
            for process, group, begun in started
            if begun is not None
        ]
        for process, group, begun, end in asked:
            try:
                process.thread = ray.get(begun, timeout=_ANSWER_S)[0]
                if end is None:
                    process.problem = f"{ENDED}: {group.ended}"
                    continue
                _, process.cost_ns, lost = ray.get(end, timeout=_ANSWER_S)
                process.problem = lost and f"its spans were not written: {lost}"
            except GetTimeoutError:
                process.problem = f"it did not answer within {_ANSWER_S:g} s"
            except RayError as error:
                process.problem = f"{ENDED}: {group.ended or type(error).__name__}"
        return [driver, *(process for process, _, _ in started)]

    def _begin(self, group: RankProcesses, followers: Collection[int]) -> None:
        assert self._directory is not None, "a trace was begun"
        for rank, member in enumerate(group.members):
            pid = member.process.pid
            path = self._directory / f"{group.role}-{rank}-{pid}.jsonl"
            clock = self._clock(member)
            process = TracedProcess(group.role, rank, pid, member.node.name, path, clock or ClockOffset(0, 0))
            begun = None
            if rank in followers:
                process.problem = "it works for rank 0, and answers no call"
            elif clock is None:
                process.problem = "the clock of its node is unknown, because the node does not answer"
            else:
                begun = member.actor.trace.remote(str(path))
            self._started.append((process, group, begun))

    def _clock(self, member: RankProcess) -> ClockOffset | None:
        node = member.node
        if node.node_id not in self._clocks:
            self._clocks[node.node_id] = clock_offset(lambda: ask(node, lambda agent: agent.clock.remote()))
        return self._clocks[node.node_id]


def clock_offset(ask_clock: Callable[[], tuple[str, int] | None]) -> ClockOffset | None:
    """Compare another host's clock with this one by the quickest of several questions. Return None without answers.

    The other clock was read at some time between question and answer, at an unknown one.
    """
    best: ClockOffset | None = None
    for _ in range(_TRIES):
        own, asked = clock_of_host()
        answer = ask_clock()
        answered = clock_of_host()[1]
        if answer is None:
            return best
        if answer[0] == own:
            return ClockOffset(0, 0)  # one kernel, one clock
        tried = ClockOffset((asked + answered) // 2 - answer[1], (answered - asked + 1) // 2)
        best = tried if best is None or tried.uncertainty_ns < best.uncertainty_ns else best
    return best
