"""The processes of a worker group: start, location, inspection and end."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray import ObjectRef
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from mrl.config.mesh import Mesh
from mrl.config.schema import DeadlinesConfig
from mrl.controller.diagnosis import NATIVE_S, NodeMemory, cause, pid_in, said_by_ray
from mrl.controller.network import Network
from mrl.controller.node_agent import ProcessId, ProcessView
from mrl.controller.worker_log import log_path, make_log_directory
from mrl.errors import WorkerDied, WorkerError, WorkerSilent
from mrl.events import EventLog, WorkerFault

if TYPE_CHECKING:
    from mrl.controller.worker_host import ProcessInfo  # with torch, for which the start of Ray need not wait

CRASH_LINES = 300
"""Number of log lines in which a crash's stacks begin: a process may have many threads."""
_AGENT_S = 5.0
"""Time limit for calls of a node's agent. Only stacks and native frames take longer."""
_STACKS_S = 20.0


@dataclass(frozen=True)
class NodeView:
    """A node with workers: its name, the agent that inspects its processes, and its network."""

    node_id: str
    name: str
    agent: Any
    memory: NodeMemory
    """Memory of the node when the run began."""
    network: Network
    is_silent: threading.Event = field(default_factory=threading.Event)
    """Set while the node does not answer, so that other calls need not wait for it."""


@dataclass(frozen=True)
class RankProcess:
    """Process of one rank."""

    actor: Any
    process: ProcessId
    node: NodeView


class RankProcesses:
    """Processes of one role, by rank."""

    def __init__(
        self, role: str, mesh: Mesh, run_directory: Path, events: EventLog, deadlines: DeadlinesConfig
    ) -> None:
        self.role = role
        self.mesh = mesh
        self.events = events
        self.deadlines = deadlines
        self.ended = ""
        """Reason why the processes were ended; empty while they run."""
        self.lost_to: WorkerError | None = None
        """Failure for which the processes were ended."""
        self.log_directory = make_log_directory(run_directory, role)
        self.members: list[RankProcess] = []
        """Processes in rank order."""

    def add(self, members: list[RankProcess]) -> None:
        """Set the processes, in rank order."""
        self.members = members

    def node(self, rank: int) -> str:
        return self.members[rank].node.name

    def name(self, rank: int) -> str:
        """Return a description of a rank for messages: role, rank, place in the layout, node, process."""
        at = self.mesh.coordinates(rank)
        axes = ((name, getattr(self.mesh, name)) for name in ("tp", "cp", "dp", "pp", "ep"))
        layout = " ".join(f"{name}{getattr(at, name)}" for name, size in axes if size > 1)
        member = self.members[rank]
        place = f" ({layout})" if layout else ""
        return f"{self.role} rank {rank}{place} on node {member.node.name}, pid {member.process.pid},"

    def poll_states(self, ranks: Sequence[int]) -> dict[int, ProcessView]:
        """Return the state of these ranks' processes. If a node does not answer, its processes count as ended."""
        views: dict[int, ProcessView] = {}
        for node_ranks, states in self._ask_nodes(ranks, lambda agent, processes: agent.poll_states.remote(processes)):
            views.update(zip(node_ranks, states or [ProcessView(None)] * len(node_ranks), strict=True))
        return views

    def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """Return the Python stacks of ranks. All nodes are asked at the same time."""
        logs = {self.members[rank].process: str(self._log(rank)) for rank in ranks}
        answers = self._ask_nodes(
            ranks,
            lambda agent, processes: agent.stacks.remote([(process, logs[process]) for process in processes]),
            _STACKS_S,
        )
        stacks: dict[int, str] = {}
        for node_ranks, texts in answers:
            stacks.update(zip(node_ranks, texts or ["its node does not answer"] * len(node_ranks), strict=True))
        return stacks

    def threads(self, rank: int) -> tuple[str, str]:
        """Return the native frames of a rank's process and the kernel's view of its threads; empty if unavailable."""
        process = self.members[rank].process
        return self._ask(rank, lambda agent: agent.threads.remote(process), NATIVE_S + _AGENT_S) or ("", "")

    def log_tail(self, rank: int, num_lines: int) -> tuple[Path, str]:
        log = self._log(rank)
        if not num_lines:
            return log, ""
        return log, self._ask(rank, lambda agent: agent.tail.remote(str(log), num_lines)) or ""

    def cause_of_death(self, rank: int, detail: str) -> tuple[str, tuple[str, ...]]:
        """Return why a rank's process ended and the evidence. `detail` is what is known so far."""
        return cause_on(self.members[rank].node, detail, self.log_tail(rank, CRASH_LINES)[1])

    def kill_all(self, reason: str) -> list[int]:
        """End all processes that still run, and return their ranks. A group never outlives one of its ranks."""
        if self.ended:
            return []
        self.ended = reason
        ranks = list(range(len(self.members)))
        running = [rank for rank, view in self.poll_states(ranks).items() if not view.is_gone]
        for member in self.members:
            ray.kill(member.actor, no_restart=True)
        self._ask_nodes(ranks, lambda agent, processes: agent.kill_all.remote(processes))
        return running

    def _log(self, rank: int) -> Path:
        return log_path(self.log_directory, rank)

    def _by_node(self, ranks: Sequence[int]) -> list[list[int]]:
        groups: dict[str, list[int]] = defaultdict(list)
        for rank in ranks:
            groups[self.members[rank].node.node_id].append(rank)
        return list(groups.values())

    def _ask_nodes(
        self, ranks: Sequence[int], question: Callable[..., Any], limit_s: float = _AGENT_S
    ) -> list[tuple[list[int], Any]]:
        """Ask the agents of all nodes of these ranks at the same time. Return each node's ranks and its answer."""
        by_node = self._by_node(ranks)
        questions = []
        for node_ranks in by_node:
            processes = [self.members[rank].process for rank in node_ranks]
            questions.append((self.members[node_ranks[0]].node, partial(question, processes=processes)))
        return list(zip(by_node, ask_all(questions, limit_s), strict=True))

    def _ask(self, rank: int, question: Callable[..., Any], limit_s: float = _AGENT_S) -> Any:
        return ask(self.members[rank].node, question, limit_s)


def ask(node: NodeView, question: Callable[[Any], Any], limit_s: float = _AGENT_S) -> Any:
    """Ask the agent of a node. Return None if it does not answer in time, or did not answer the last caller."""
    return ask_all([(node, question)], limit_s)[0]


def ask_all(questions: Sequence[tuple[NodeView, Callable[[Any], Any]]], limit_s: float = _AGENT_S) -> list[Any]:
    """Ask the agents of several nodes at the same time. The limit is for all of them together."""
    until = time.monotonic() + limit_s
    answers = [None if node.is_silent.is_set() else question(node.agent) for node, question in questions]
    return [None if answer is None else _answer(answer, until - time.monotonic()) for answer in answers]


def _answer(reference: Any, limit_s: float) -> Any:
    try:
        return ray.get(reference, timeout=max(0.0, limit_s))
    except RayError:
        return None


def cause_on(node: NodeView, detail: str, log: str) -> tuple[str, tuple[str, ...]]:
    """Return why a process ended and the evidence, from the detail known so far, its log and its node's memory."""
    memory = ask(node, lambda agent: agent.memory.remote())
    if memory is None:
        return detail, ("its node does not answer: the whole node may be lost",)
    return cause(detail, log, node.memory, memory)


_LOG_LINES = 20


def collect_handshakes(
    role: str, actors: Sequence[Any], nodes: Sequence[NodeView], deadline_s: float, events: EventLog
) -> list[ProcessInfo]:
    """Wait until all processes are up. Rank 0 opens the address where its group will meet. If one fails, end them all.

    `nodes` are the nodes of the ranks.
    """
    began = time.monotonic()
    address = nodes[0].network.address
    greetings = [actor.handshake.remote(None if rank else address) for rank, actor in enumerate(actors)]
    try:
        hellos: list[ProcessInfo] = ray.get(greetings, timeout=deadline_s)
        return hellos
    except GetTimeoutError:
        error = _never_came(role, greetings, nodes, deadline_s)
    except RayError:
        error = _ended(role, greetings, nodes, time.monotonic() - began, events)
    for actor in actors:
        ray.kill(actor, no_restart=True)
    raise error


def _never_came(role: str, greetings: Sequence[ObjectRef], nodes: Sequence[NodeView], deadline_s: float) -> WorkerError:
    ready, waiting = ray.wait(greetings, num_returns=len(greetings), timeout=0)
    ranks = [rank for rank, greeting in enumerate(greetings) if greeting in set(waiting)]
    names = ", ".join(dict.fromkeys(nodes[rank].name for rank in ranks))
    return WorkerSilent(
        f"{len(ready)} of {len(greetings)} processes of {role} started within {deadline_s:g} s; "
        f"missing: ranks {ranks} on {names}",
        fix=f"run `mrl env` on {names} to see how long imports take there, or raise deadlines.start_s",
        role=role,
        ranks=ranks,
    )


def _ended(
    role: str, greetings: Sequence[ObjectRef], nodes: Sequence[NodeView], seconds: float, events: EventLog
) -> WorkerError:
    """Return an error that names the first failed process, its node, the cause, and its last output."""
    failures = _failures(greetings)
    rank, failure = next(iter(failures.items()))
    node, text = nodes[rank], str(failure)
    pid, log = pid_in(text), ""
    hints: tuple[str, ...] = ()
    if isinstance(failure, RayTaskError):
        kind, detail = "raised", str(failure.cause)
    else:
        kind, detail = "died", said_by_ray(text)
        log = ask(node, lambda agent: agent.first_words.remote(pid, CRASH_LINES)) or "" if pid else ""
        detail, hints = cause_on(node, detail, log)
    events.write(WorkerFault(role, rank, node.name, "handshake", kind, detail, seconds))
    lines = [f"{role} rank {rank} on node {node.name} {kind} before it was up, after {seconds:.1f} s: {detail}", *hints]
    lines += [f"| {line}" for line in log.splitlines()[-_LOG_LINES:]]
    has_fix = any(hint.startswith("fix:") for hint in hints)
    fix = "" if has_fix else f"run `mrl env` on {node.name} to check its installation"
    return WorkerDied("\n  ".join(lines), fix=fix, role=role, ranks=list(failures))


def _failures(greetings: Sequence[ObjectRef]) -> dict[int, RayError]:
    failures = {}
    for rank, greeting in enumerate(greetings):
        try:
            ray.get(greeting, timeout=0)
        except GetTimeoutError:
            continue
        except RayError as error:
            failures[rank] = error
    return failures
