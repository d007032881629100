"""The first word of fresh processes: who and where each is, or why one never came up."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from mrl.controller.death import pid_in, said_by_ray
from mrl.controller.processes import CRASH_LINES, NodeView, ask, cause_on
from mrl.controller.worker_host import ProcessInfo
from mrl.errors import WorkerDied, WorkerError, WorkerSilent
from mrl.events import EventLog, WorkerFault

_LOG_LINES = 20


def collect_handshakes(
    role: str, actors: Sequence[Any], nodes: Sequence[NodeView], deadline_s: float, events: EventLog
) -> list[ProcessInfo]:
    """Wait until every process is up; rank 0 opens the address on which its group will meet. All end where one fails.

    `nodes` are those of the ranks.
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
        f"{len(ready)} of {len(greetings)} processes of {role} came up within {deadline_s:g} s; "
        f"still missing: ranks {ranks} on {names}",
        fix=f"`mrl env` on {names} shows how long imports take there; or raise deadlines.start_s",
        role=role,
        ranks=ranks,
    )


def _ended(
    role: str, greetings: Sequence[ObjectRef], nodes: Sequence[NodeView], seconds: float, events: EventLog
) -> WorkerError:
    """Name the first process that ended or raised, its node, the cause, and what it said last."""
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
    fix = "" if has_fix else f"`mrl env` on {node.name} says what of the stack works there"
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
