"""The processes behind a worker group: where each one runs, how to look at it, and how to end it."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from mrl.config.mesh import Mesh
from mrl.config.schema import DeadlinesConfig
from mrl.controller.death import NodeMemory, cause
from mrl.controller.network import Network
from mrl.controller.node_agent import ProcessId, ProcessView
from mrl.controller.threads import NATIVE_S
from mrl.controller.worker_log import log_path, make_log_directory
from mrl.errors import WorkerError
from mrl.events import EventLog

CRASH_LINES = 300
"""Of a log, among which a crash's stacks begin: a process may have many threads."""
_AGENT_S = 5.0
"""How long a node's agent may take for a look: it does nothing that takes longer, but for native frames."""


@dataclass(frozen=True)
class NodeView:
    """A node that workers run on: its name, the agent that looks at its processes, and how it is reached."""

    node_id: str
    name: str
    agent: Any
    memory: NodeMemory
    """As it was when the run began."""
    network: Network
    is_silent: threading.Event = field(default_factory=threading.Event)
    """Set while it does not answer: nobody else need wait for it."""


@dataclass(frozen=True)
class RankProcess:
    """One rank's process."""

    actor: Any
    process: ProcessId
    node: NodeView


class RankProcesses:
    """The processes of one role, by rank."""

    def __init__(
        self, role: str, mesh: Mesh, run_directory: Path, events: EventLog, deadlines: DeadlinesConfig
    ) -> None:
        self.role = role
        self.mesh = mesh
        self.events = events
        self.deadlines = deadlines
        self.ended = ""
        """Why the processes were ended; empty while they run."""
        self.lost_to: WorkerError | None = None
        """The failure that they were ended for."""
        self.log_directory = make_log_directory(run_directory, role)
        self._members: list[RankProcess] = []

    def add(self, members: list[RankProcess]) -> None:
        """Take in the processes, in the order of their ranks."""
        self._members = members

    def node(self, rank: int) -> str:
        """Return the name of a rank's node."""
        return self._members[rank].node.name

    def name(self, rank: int) -> str:
        """Return a rank as a reader wants it named: role, rank, place in the layout, node, process."""
        at = self.mesh.coordinates(rank)
        axes = ((name, getattr(self.mesh, name)) for name in ("tp", "cp", "dp", "pp", "ep"))
        layout = " ".join(f"{name}{getattr(at, name)}" for name, size in axes if size > 1)
        member = self._members[rank]
        place = f" ({layout})" if layout else ""
        return f"{self.role} rank {rank}{place} on node {member.node.name}, pid {member.process.pid},"

    def poll_states(self, ranks: Sequence[int]) -> dict[int, ProcessView]:
        """Return the state of these ranks' processes. Where a node does not answer, its processes count as gone."""
        views: dict[int, ProcessView] = {}
        for node_ranks in self._by_node(ranks):
            processes = [self._members[rank].process for rank in node_ranks]
            seen = self._ask(node_ranks[0], lambda agent, processes=processes: agent.poll_states.remote(processes))
            views.update(zip(node_ranks, seen or [ProcessView(None)] * len(node_ranks), strict=True))
        return views

    def stack(self, rank: int) -> str:
        """Return the Python stacks of a rank's process."""
        process, log = self._members[rank].process, str(self._log(rank))
        return self._ask(rank, lambda agent: agent.stack.remote(process, log)) or "its node does not answer"

    def threads(self, rank: int) -> tuple[str, str]:
        """The native frames of a rank's process, and the kernel's view of its threads; empty where there are none."""
        process = self._members[rank].process
        return self._ask(rank, lambda agent: agent.threads.remote(process), NATIVE_S + _AGENT_S) or ("", "")

    def log_tail(self, rank: int, num_lines: int) -> tuple[Path, str]:
        """Return where a rank's log is, and its last lines."""
        log = self._log(rank)
        if not num_lines:
            return log, ""
        return log, self._ask(rank, lambda agent: agent.tail.remote(str(log), num_lines)) or ""

    def cause_of_death(self, rank: int, said: str) -> tuple[str, tuple[str, ...]]:
        """Return why a rank's process ended, where no more is said than this, and what speaks for it."""
        return cause_on(self._members[rank].node, said, self.log_tail(rank, CRASH_LINES)[1])

    def kill_all(self, reason: str) -> list[int]:
        """End every process that still runs; the ranks that did. A group never outlives one of its ranks."""
        if self.ended:
            return []
        self.ended = reason
        ranks = list(range(len(self._members)))
        running = [rank for rank, view in self.poll_states(ranks).items() if not view.is_gone]
        for member in self._members:
            ray.kill(member.actor, no_restart=True)
        for node_ranks in self._by_node(ranks):
            processes = [self._members[rank].process for rank in node_ranks]
            self._ask(node_ranks[0], lambda agent, processes=processes: agent.kill_all.remote(processes))
        return running

    def _log(self, rank: int) -> Path:
        return log_path(self.log_directory, rank)

    def _by_node(self, ranks: Sequence[int]) -> list[list[int]]:
        groups: dict[str, list[int]] = defaultdict(list)
        for rank in ranks:
            groups[self._members[rank].node.node_id].append(rank)
        return list(groups.values())

    def _ask(self, rank: int, question: Callable[..., Any], limit_s: float = _AGENT_S) -> Any:
        return ask(self._members[rank].node, question, limit_s)


def ask(node: NodeView, question: Callable[[Any], Any], limit_s: float = _AGENT_S) -> Any:
    """Ask the agent of a node; None where it does not answer in time, or has not answered whoever asked before."""
    if node.is_silent.is_set():
        return None
    try:
        return ray.get(question(node.agent), timeout=limit_s)
    except RayError:
        return None


def cause_on(node: NodeView, said: str, log: str) -> tuple[str, tuple[str, ...]]:
    """Why a process of a node ended, of which no more is said than this and what it wrote, and what speaks for it."""
    now = ask(node, lambda agent: agent.memory.remote())
    if now is None:
        return said, ("its node does not answer: the whole node may be lost",)
    return cause(said, log, node.memory, now)
