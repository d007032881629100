"""Whether every node of a cluster reaches every other, tried before a worker would wait for it in silence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mrl.controller.node_agent import NodeAgent
from mrl.controller.nodes import NodeInfo, node_answers
from mrl.errors import PlacementError

LINK_FIX = (
    "let TCP through between these nodes, on all ports; or it is the wrong interface: start Ray with --node-ip-address "
    "on another, or name another in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
)
_CONNECT_S = 5.0
_MAX_SAID = 8


@dataclass(frozen=True)
class LinkedNode:
    """A node with an agent on it, and the address by which Ray knows it."""

    name: str
    address: str
    agent: Any


def start_agent(node_id: str) -> Any:
    """Start an agent on this node."""
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(NodeAgent).options(num_cpus=0, scheduling_strategy=there).remote()


@contextmanager
def linked_nodes(offers: Sequence[NodeInfo]) -> Iterator[list[LinkedNode]]:
    """An agent on each of these nodes for the length of the block."""
    nodes = [LinkedNode(offer.name, offer.address, start_agent(offer.node_id)) for offer in offers]
    try:
        yield nodes
    finally:
        for node in nodes:
            ray.kill(node.agent)


def broken_links(nodes: Sequence[LinkedNode], deadline_s: float) -> list[str]:
    """Return who does not reach whom, where, and why, of so many as somebody reads; every pair is tried at once.

    Nodes of one address are one machine, which needs no network to reach itself.
    """
    if len({node.address for node in nodes}) < 2:
        return []
    listening = _ask([node.agent.listen.remote(node.address) for node in nodes], deadline_s)
    for node in (node for node, endpoints in zip(nodes, listening, strict=True) if not endpoints):
        what = f"Ray knows node {node.name} by {node.address}, which no interface there carries"
        raise PlacementError(what, fix="start Ray there with --node-ip-address and an address of that node")
    pairs = [
        [
            (target, end)
            for target, ends in zip(nodes, listening, strict=True)
            for end in ends
            if target.address != node.address
        ]
        for node in nodes
    ]
    asked = [
        node.agent.failures.remote([end for _, end in others], _CONNECT_S)
        for node, others in zip(nodes, pairs, strict=True)
    ]
    answers = _ask(asked, deadline_s)
    _ask([node.agent.stop_listening.remote() for node in nodes], deadline_s)
    broken = [
        f"{node.name} does not reach {target.name} at {end.address} ({end.interface}): {why}"
        for node, others, reasons in zip(nodes, pairs, answers, strict=True)
        for (target, end), why in zip(others, reasons, strict=True)
        if why
    ]
    return broken[:_MAX_SAID] + [f"and {len(broken) - _MAX_SAID} more"] * (len(broken) > _MAX_SAID)


def _ask(questions: list[Any], deadline_s: float) -> list[Any]:
    return node_answers(questions, deadline_s, fix="look at Ray's logs on the nodes")
