"""The driver's part of calls to many ranks: one message per node, to the node's agent, which calls the ranks there."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import RayError

from mrl.controller.node_calls import NodeMessage, NodeRank, Outcome, is_small
from mrl.controller.processes import NodeView, ask_all
from mrl.errors import WorkerDied


@dataclass(frozen=True)
class NodeCall:
    """One call on the ranks of a node, under way."""

    node: NodeView
    ranks: Sequence[int]
    group: str
    number: int
    reference: ObjectRef
    """The outcomes of the ranks, in this order, if all have answered."""


class FanOut:
    """The nodes of some ranks of a worker group."""

    def __init__(self, role: str, ranks: Mapping[int, NodeRank], nodes: Sequence[NodeView], limit_s: float) -> None:
        """`nodes` are the nodes of all ranks of the group."""
        group = f"{role}-{uuid.uuid4().hex}"
        self._number = 0
        by_node: dict[str, list[int]] = defaultdict(list)
        for rank in ranks:
            by_node[nodes[rank].node_id].append(rank)
        # The name has the node, because benchmarks let one agent stand for several nodes.
        self._nodes = [(nodes[members[0]], f"{group}-{node_id}", members) for node_id, members in by_node.items()]
        self._shards = [{ranks[rank].shard for rank in members} for _, _, members in self._nodes]
        adopted = [
            node.agent.adopt.remote(group, [ranks[rank] for rank in members]) for node, group, members in self._nodes
        ]
        try:
            ray.get(adopted, timeout=limit_s)
        except RayError as error:
            raise WorkerDied(f"a node's agent did not take over the ranks of {role}: {error}", role=role) from error

    def call(
        self,
        method: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        plans: Sequence[Any] | None = None,
        *,
        writes: bool = False,
    ) -> list[NodeCall]:
        """Call all ranks. `plans` has the plan of each shard and its objects, if the method takes shards."""
        arguments = _portable([list(args), dict(kwargs)])
        portable = None if plans is None else [[_portable(plan), objects] for plan, objects in plans]
        number, calls = self._number, []
        for (node, group, members), shards in zip(self._nodes, self._shards, strict=True):
            local = None if portable is None else {shard: portable[shard] for shard in shards}
            message = NodeMessage(method, arguments, local, writes)
            reference = node.agent.call_ranks.remote(group, number, message)
            calls.append(NodeCall(node, members, group, number, reference))
        self._number += 1
        return calls


def outcomes_of(calls: Iterable[NodeCall], wait_s: float, limit_s: float) -> dict[int, Outcome | None]:
    """Return the outcome of each rank, or None if it has not answered or its node does not say.

    The nodes wait for `wait_s` for ranks that have not answered. `limit_s` is for the nodes themselves.
    """
    calls = list(calls)
    questions = [(call.node, partial(_ask_outcomes, call, wait_s)) for call in calls]
    known: dict[int, Outcome | None] = {}
    for call, answer in zip(calls, ask_all(questions, wait_s + limit_s), strict=True):
        known.update(zip(call.ranks, answer or [None] * len(call.ranks), strict=True))
    return known


def _ask_outcomes(call: NodeCall, wait_s: float, agent: Any) -> Any:
    return agent.outcomes.remote(call.group, call.number, wait_s)


def _portable(value: Any) -> Any:
    """Return a value that an agent can pass on: itself if it is small, otherwise a reference to it."""
    return value if is_small(value) else ray.put(value)
