"""The nodes of a Ray cluster that has been joined: who is there, and whether each of them reaches every other."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mrl.controller.node_agent import NodeAgent
from mrl.errors import PlacementError, TooFewDevices
from mrl.registry import load_attribute

_POLL_S = 0.5


@dataclass(frozen=True)
class NodeInfo:
    """A node that is up, the number of its devices, and the address by which Ray knows it."""

    node_id: str
    name: str
    devices: int
    address: str


def offered_nodes(device: str) -> list[NodeInfo]:
    """Return the nodes that are up, by name."""
    resource = "CPU" if device == "cpu" else "GPU"
    offers = [
        NodeInfo(node["NodeID"], node["NodeName"], int(node["Resources"].get(resource, 0)), node["NodeManagerAddress"])
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(offers, key=lambda offer: offer.name)


def free_devices(device: str) -> int:
    return int(ray.available_resources().get("CPU" if device == "cpu" else "GPU", 0))


def wait_for_nodes(names: Sequence[str], device: str, devices_per_node: int, deadline_s: float) -> None:
    """Return when every named node is up with its devices; at the deadline an error names those that are not."""
    began = time.monotonic()
    while True:
        devices_of = {offer.name: offer.devices for offer in offered_nodes(device)}
        absent = [name for name in names if name not in devices_of]
        short = [name for name in names if devices_of.get(name, devices_per_node) < devices_per_node]
        if not absent and not short:
            return
        if time.monotonic() - began > deadline_s:
            said = [f"{name} has not joined" for name in absent]
            said += [f"{name} offers {devices_of[name]} of {devices_per_node} devices" for name in short]
            what = f"{len(said)} of {len(names)} nodes are not ready after {deadline_s:g} s: {'; '.join(said)}"
            raise TooFewDevices(what, len(names) - len(said), fix="look at the logs of these nodes")
        time.sleep(_POLL_S)


def run_on_nodes(node_ids: Sequence[str], probe: str, arguments: Sequence[Any], deadline_s: float) -> list[Any]:
    """Run the function `package.module:name` on each of these nodes; return its results."""
    task = ray.remote(num_cpus=0, max_retries=0)(_call)
    on = [NodeAffinitySchedulingStrategy(node_id, soft=False) for node_id in node_ids]
    asked = [task.options(scheduling_strategy=node).remote(probe, list(arguments)) for node in on]
    return node_answers(asked, deadline_s, fix="is the same mrl installed on every node?")


def node_answers(asked: Sequence[ObjectRef], deadline_s: float, fix: str) -> list[Any]:
    """Return what was asked of nodes, one answer for each."""
    try:
        answers: list[Any] = ray.get(list(asked), timeout=deadline_s)
    except RayError as error:
        raise PlacementError(f"a node does not answer: {str(error).strip().splitlines()[-1]}", fix=fix) from error
    return answers


def _call(probe: str, arguments: list[Any]) -> Any:
    return load_attribute(probe)(*arguments)


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
