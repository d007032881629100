"""A call under way. It always ends: with all answers, or with an error that names the failed rank."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError, RayError, RayTaskError

from mrl.controller.diagnosis import said_by_ray
from mrl.controller.fan_out import NodeCall, outcomes_of
from mrl.controller.node_calls import DIED, RAISED, STAYS, Outcome, RanksFailed
from mrl.controller.processes import RankProcesses
from mrl.controller.worker_host import RankFailed
from mrl.errors import WorkerDied, WorkerError, WorkerRaised, WorkerSilent
from mrl.events import RanksReleased, WorkerFault

_STOPPED_LOOKS = 2
"""Number of consecutive polls in which a process must be stopped: a debugger may stop it for a moment."""
_LOG_LINES = 20
_NODE_S = 5.0
"""Time limit for nodes that are asked for outcomes."""


@dataclass(frozen=True)
class RankFailure:
    """Failure of one rank."""

    rank: int
    kind: str
    """`died`, `raised`, `stopped` or `silent`, in the order in which they explain each other."""
    detail: str
    at: float = 0.0
    trace: str = ""
    hints: tuple[str, ...] = ()
    """Evidence of why a process died, from its node."""


class Call:
    """One method call on some ranks of a worker group."""

    def __init__(
        self,
        processes: RankProcesses,
        phase: str,
        references: dict[int, ObjectRef],
        deadline_s: float,
        followers: Mapping[int, ObjectRef] | None = None,
        nodes: Sequence[NodeCall] = (),
    ) -> None:
        """`followers` are calls of other ranks. They never end, unless such a rank fails, which ends this call.

        `nodes` are calls of further ranks through the agents of their nodes.
        """
        self._processes = processes
        self._phase = phase
        self._references = references
        self._followers = followers or {}
        self._nodes = nodes
        self._outcomes: dict[int, Outcome | None] = {}
        """Outcomes of the nodes' ranks, as far as the nodes know. Set when the call has failed."""
        self.stored: dict[int, ObjectRef] = {}
        """Columns that ranks have stored. Those of the nodes' ranks are added by `wait`."""
        self._deadline_s = deadline_s
        self._began = time.monotonic()

    def wait(self) -> list[Any]:
        """Wait for all answers. Return them in rank order."""
        references = [*self._references.values(), *(node.reference for node in self._nodes)]
        looks_stopped: dict[int, int] = {}
        while True:
            if self._followers and ray.wait(list(self._followers.values()), timeout=0)[0]:
                raise self._explain([])
            left_s = self._deadline_s - (time.monotonic() - self._began)
            limit_s = max(0.0, min(left_s, self._processes.deadlines.heartbeat_s))
            try:
                return self._in_rank_order(ray.get(references, timeout=limit_s), limit_s)
            except GetTimeoutError:
                stopped = self._look(looks_stopped)
                if stopped or left_s <= self._processes.deadlines.heartbeat_s:
                    raise self._explain(stopped) from None
            except RayError:
                raise self._explain([]) from None

    def _in_rank_order(self, replies: list[Any], limit_s: float) -> list[Any]:
        """Return the answers of all ranks. Fetch the answers that have stayed on their nodes."""
        if not self._nodes:
            return replies
        direct = len(self._references)
        answers = dict(zip(self._references, replies[:direct], strict=True))
        staying: dict[int, ObjectRef] = {}
        for node, outcomes in zip(self._nodes, replies[direct:], strict=True):
            for rank, (kind, answer, stored) in zip(node.ranks, outcomes, strict=True):
                (staying if kind == STAYS else answers)[rank] = answer
                if stored is not None:
                    self.stored[rank] = stored
        answers |= zip(staying, ray.get(list(staying.values()), timeout=limit_s), strict=True)
        return [answers[rank] for rank in sorted(answers)]

    def _look(self, looks_stopped: dict[int, int]) -> list[int]:
        """Return the unanswered ranks whose processes have been stopped for several polls."""
        views = self._processes.poll_states(self._unanswered())
        answered = self._answered_in_nodes({rank for rank, view in views.items() if view.is_stopped})
        for rank, view in views.items():
            is_stopped = view.is_stopped and rank not in answered
            looks_stopped[rank] = looks_stopped.get(rank, 0) + 1 if is_stopped else 0
        return [rank for rank, looks in looks_stopped.items() if looks >= _STOPPED_LOOKS]

    def _unanswered(self) -> list[int]:
        """Return the ranks without an answer. For those of a node: all, until the node has the answers of all."""
        calls = [([rank], reference) for rank, reference in {**self._references, **self._followers}.items()]
        calls += [(list(node.ranks), node.reference) for node in self._nodes]
        _, waiting = ray.wait([reference for _, reference in calls], num_returns=len(calls), timeout=0)
        pending = set(waiting)
        return [rank for ranks, reference in calls if reference in pending for rank in ranks]

    def _answered_in_nodes(self, ranks: set[int]) -> list[int]:
        nodes = [node for node in self._nodes if not ranks.isdisjoint(node.ranks)]
        return [rank for rank, outcome in outcomes_of(nodes, 0.0, _NODE_S).items() if outcome is not None]

    def _explain(self, stopped: Sequence[int]) -> WorkerError:
        """Find the failed ranks, end the other ranks, write events, and return the error."""
        seconds = time.monotonic() - self._began
        references = [*self._references.values(), *self._followers.values()]
        release_s = self._processes.deadlines.release_s if seconds < self._deadline_s and not stopped else 0.0
        until = time.monotonic() + release_s
        self._outcomes = outcomes_of(self._nodes, release_s, _NODE_S)
        if release_s:
            ray.wait(references, num_returns=len(references), timeout=max(0.0, until - time.monotonic()))
        # Answers of all ranks may be known, but some stay on a node that does not send them.
        faults = self._with_stacks(self._faults() or [_unheard(rank, is_stopped=False) for rank in self._called()])
        culprits = [self._with_cause(fault) for fault in root_causes(faults)]
        report = self._describe(culprits[0], seconds)
        for fault in culprits[1:]:
            report += f"\n  also {self._processes.name(fault.rank)} {fault.detail}"
        for fault in culprits:
            self._processes.events.write(
                WorkerFault(
                    self._processes.role,
                    fault.rank,
                    self._processes.node(fault.rank),
                    self._phase,
                    fault.kind,
                    fault.detail,
                    seconds,
                )
            )
        all_raised = {(fault.rank, fault.kind) for fault in faults} == {(rank, "raised") for rank in self._called()}
        if not all_raised:
            reason = f"rank {culprits[0].rank} {culprits[0].kind} in {self._phase}"
            released = self._processes.kill_all(reason)
            self._processes.events.write(RanksReleased(self._processes.role, released, reason))
            released_ranks = [rank for rank in released if rank not in {fault.rank for fault in culprits}]
            if released_ranks:
                report += f"\n  the other ranks were ended: {', '.join(map(str, released_ranks))}"
        error_type = {"died": WorkerDied, "raised": WorkerRaised}.get(culprits[0].kind, WorkerSilent)
        error: WorkerError = error_type(report, role=self._processes.role, ranks=[fault.rank for fault in culprits])
        if not all_raised:
            self._processes.lost_to = error
        return error

    def _called(self) -> list[int]:
        return sorted([*self._references, *(rank for node in self._nodes for rank in node.ranks)])

    def _faults(self) -> list[RankFailure]:
        """Return the fault of each rank without an answer, and of followers that have ended or are stopped."""
        everyone = [*self._called(), *self._followers]
        views = self._processes.poll_states(everyone)
        known = self._known_faults()
        faults = []
        for rank in everyone:
            fault = known.get(rank)
            if rank in known and fault is None:
                continue
            if rank not in known and rank in self._followers and not (views[rank].is_gone or views[rank].is_stopped):
                continue
            if views[rank].is_gone and (fault is None or fault.kind == "raised"):
                # If a node is lost, a process can see its neighbor's end before it ends itself.
                fault = RankFailure(rank, "died", "its process has ended")
            elif fault is not None and rank in self._followers:
                fault = replace(fault, kind="died")  # a part of the group's work is lost
            faults.append(fault or _unheard(rank, views[rank].is_stopped))
        return faults

    def _known_faults(self) -> dict[int, RankFailure | None]:
        """Return the fault of each rank that has answered or failed; None if it has answered."""
        unanswered = set(self._unanswered())
        everyone = {**self._references, **self._followers}
        known = {rank: _fault_of(rank, reference) for rank, reference in everyone.items() if rank not in unanswered}
        for node in self._nodes:
            for rank in node.ranks:
                if (outcome := self._outcomes.get(rank)) is not None:
                    known[rank] = _fault_in(rank, outcome)
                elif rank not in unanswered and not _ranks_have_failed(node.reference):
                    known[rank] = _fault_of(rank, node.reference)  # the agent itself has failed
        return known

    def _with_stacks(self, faults: list[RankFailure]) -> list[RankFailure]:
        """Add the stacks of processes that do not answer, if no other fault explains their silence."""
        kinds = {fault.kind for fault in faults}
        if {"died", "raised"} & kinds:
            return faults
        kind = "stopped" if "stopped" in kinds else "silent"
        stacks = self._processes.stacks([fault.rank for fault in faults if fault.kind == kind])
        return [replace(fault, trace=stacks.get(fault.rank, "")) for fault in faults]

    def _with_cause(self, fault: RankFailure) -> RankFailure:
        if fault.kind != "died":
            return fault
        detail, hints = self._processes.cause_of_death(fault.rank, fault.detail)
        return replace(fault, detail=detail, hints=hints)

    def _describe(self, fault: RankFailure, seconds: float) -> str:
        verbs = {"died": "died", "raised": "raised", "stopped": "is stopped", "silent": "did not answer"}
        when = f"in {self._phase} after {seconds:.1f} s"
        lines = [f"{self._processes.name(fault.rank)} {verbs[fault.kind]} {when}: {fault.detail}"]
        lines += [f"  {hint}" for hint in fault.hints]
        if fault.trace:
            lines += ["  Python stack:" if fault.kind != "raised" else "  traceback:", *_indented(fault.trace)]
        if fault.kind == "silent":
            native, kernel = self._processes.threads(fault.rank)
            lines += ["  native frames:", *_indented(native), "  its threads in the kernel:", *_indented(kernel)]
        if fault.kind != "raised":
            log, text = self._processes.log_tail(fault.rank, _LOG_LINES)
            lines += [f"  last lines of {log}:" if text else f"  nothing in {log}", *_indented(text)]
        else:
            lines.append(f"  its log: {self._processes.log_tail(fault.rank, 0)[0]}")
        return "\n".join(lines)


def root_causes(faults: Sequence[RankFailure]) -> list[RankFailure]:
    """Return the faults that explain the others.

    A death explains the broken connections that its neighbors report; the first raised error explains later ones. A
    stopped process explains the ranks that wait for it; so does a rank that is busy elsewhere while the others wait in
    a collective.
    """
    for kind in ("died", "raised", "stopped"):
        matching = [fault for fault in faults if fault.kind == kind]
        if matching:
            return [min(matching, key=lambda fault: fault.at)] if kind == "raised" else matching
    elsewhere = [fault for fault in faults if not _is_in_collective(fault.trace)]
    return elsewhere or list(faults)


def _is_in_collective(stack: str) -> bool:
    """Return whether the innermost Python frames of a thread are in torch.distributed."""
    return any("torch/distributed/" in line for line in stack.splitlines())


def _unheard(rank: int, is_stopped: bool) -> RankFailure:
    """Return the fault of a live process that does not answer."""
    if is_stopped:
        return RankFailure(rank, "stopped", "by a signal or a debugger")
    return RankFailure(rank, "silent", "no answer before the deadline")


def _ranks_have_failed(reference: ObjectRef) -> bool:
    """Return whether an agent has failed only because a rank has."""
    try:
        ray.get(reference, timeout=0)
    except RayTaskError as error:
        return isinstance(error.cause, RanksFailed)
    except RayError:
        return False
    return False


def _fault_in(rank: int, outcome: Outcome) -> RankFailure | None:
    kind, detail, *rest = outcome
    if kind == DIED:
        return RankFailure(rank, "died", said_by_ray(detail))
    return RankFailure(rank, "raised", detail, *rest) if kind == RAISED else None


def _fault_of(rank: int, reference: ObjectRef) -> RankFailure | None:
    """Return the fault that a finished reference reports; None if it is an answer."""
    try:
        ray.get(reference, timeout=0)
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, RankFailed):
            return RankFailure(rank, "raised", cause.message, cause.at, cause.trace)
        return RankFailure(rank, "raised", str(cause if cause is not None else error), time.time())
    except (RayActorError, OutOfMemoryError) as error:
        return RankFailure(rank, "died", said_by_ray(str(error)))
    except RayError as error:
        return RankFailure(rank, "raised", f"{type(error).__name__}: {error}", time.time())
    return None


def _indented(text: str) -> list[str]:
    return [f"  | {line}" for line in text.splitlines()]
