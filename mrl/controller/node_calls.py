"""The agent's part of calls to many ranks: it calls the ranks of its node, and gathers their outcomes.

The driver then sends one message per node instead of one per rank. The agent reads no argument and no answer that
needs the code of a worker: it passes references to them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError

Method = TypeVar("Method", bound=Callable[..., Any])
ANSWERED, STAYS, RAISED, DIED = "answered", "stays", "raised", "died"
Outcome: TypeAlias = list[Any]
"""Result of a call on one rank.

`[ANSWERED, answer, stored columns]`, `[STAYS, reference to the answer, stored columns]`, `[RAISED, message, time,
traceback]`, or `[DIED, reason according to Ray, time, ""]`. Stored columns are a reference, or None.
"""

CONCURRENCY_GROUP = "calls"
"""Event loop of the agent for calls. Its other methods may block for seconds."""
_SMALL_BYTES = 64 * 1024
_SMALL_ITEMS = 1024


def is_small(value: Any) -> bool:
    """Return whether a value is short and made of plain Python types, which every process can read."""
    kind = type(value)
    if kind in (str, bytes):
        return len(value) <= _SMALL_BYTES
    if kind in (list, tuple):
        return len(value) <= _SMALL_ITEMS and all(map(is_small, value))
    if kind is dict:
        return len(value) <= _SMALL_ITEMS and all(map(is_small, [*value, *value.values()]))
    return value is None or kind in (bool, int, float)


@dataclass(frozen=True)
class NodeRank:
    """A rank of the node: its process, its data-parallel shard, and whether it answers for the shard."""

    actor: Any
    shard: int
    speaks: bool


@dataclass(frozen=True)
class NodeMessage:
    """A call on all ranks of a group on a node."""

    method: str
    arguments: Any
    """`[args, kwargs]`, or a reference to them."""
    plans: dict[int, list[Any]] | None
    """Shard -> `[its plan or a reference to it, the objects of the plan]`. None if ranks get no shard."""
    writes: bool
    """Whether ranks that speak return stored columns."""


class RanksFailed(Exception):
    """Raised when a rank has died or raised an error. The caller then asks for the outcomes."""


@dataclass
class _Group:
    """Ranks of a worker group on this node, and its calls."""

    ranks: Sequence[NodeRank]
    next_call: int = 0
    turn: asyncio.Condition = field(default_factory=asyncio.Condition)
    calls: dict[int, list[asyncio.Task[Outcome]]] = field(default_factory=dict)
    """Calls under way, and calls that failed, by number."""


def _among_calls(method: Method) -> Method:
    """Let a method of the agent run in the event loop for calls."""
    marked: Method = ray.method(concurrency_group=CONCURRENCY_GROUP)(method)
    return marked


class NodeCalls:
    """Calls the ranks of a node for the driver."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}

    @_among_calls
    async def adopt(self, group: str, ranks: Sequence[NodeRank]) -> bool:
        """Take over the calls of a worker group on this node."""
        self._groups[group] = _Group(ranks)
        return True

    @_among_calls
    async def call_ranks(self, group: str, number: int, message: NodeMessage) -> list[Outcome]:
        """Call all ranks of a group, in the order of the calls' numbers: Ray may change the order of messages.

        Return the outcomes when all ranks have answered. Raise an error as soon as one has failed.
        """
        ours = self._groups[group]
        async with ours.turn:
            await ours.turn.wait_for(lambda: ours.next_call == number)
            tasks = [asyncio.ensure_future(_outcome(*_ask(rank, message))) for rank in ours.ranks]
            ours.calls[number] = tasks
            ours.next_call += 1
            ours.turn.notify_all()
        for done in asyncio.as_completed(tasks):
            if (await done)[0] in (RAISED, DIED):
                raise RanksFailed
        del ours.calls[number]
        return [task.result() for task in tasks]

    @_among_calls
    async def outcomes(self, group: str, number: int, wait_s: float) -> list[Outcome | None]:
        """Return the outcomes of a call when all are known or the time is over. None stands for an unknown outcome."""
        ours = self._groups[group]
        if number not in ours.calls:
            return [None if number >= ours.next_call else [ANSWERED, None, None]] * len(ours.ranks)
        tasks = ours.calls[number]
        await asyncio.wait(tasks, timeout=wait_s)
        return [task.result() if task.done() else None for task in tasks]


def _ask(rank: NodeRank, message: NodeMessage) -> list[Any]:
    """Start the call on a rank. Return references to its outcome, its answer if that is not small, and its columns."""
    plan, objects = (None, []) if message.plans is None else message.plans[rank.shard]
    num_returns = 3 if message.writes and rank.speaks else 2
    # Ray resolves references that are arguments themselves, in the rank's process.
    references: list[Any] = rank.actor.call_for_node.options(num_returns=num_returns).remote(
        message.method, rank.speaks, message.arguments, plan, *objects
    )
    return references


async def _outcome(outcome: Any, answer: Any, stored: Any = None) -> Outcome:
    try:
        known: Outcome = await outcome
    except RayError as error:
        is_dead = isinstance(error, RayActorError | OutOfMemoryError)
        return [DIED, str(error), time.time(), ""] if is_dead else [RAISED, _text(error), time.time(), ""]
    if known[0] == RAISED:
        return known
    return [*known, stored] if known[0] == ANSWERED else [STAYS, answer, stored]


def _text(error: RayError) -> str:
    return f"{type(error).__name__}: {error}"
