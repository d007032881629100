"""The nodes of a joined Ray cluster, and whether each can reach all others."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mrl.controller.network import Endpoint
from mrl.controller.node_agent import NodeAgent
from mrl.controller.node_calls import CONCURRENCY_GROUP
from mrl.errors import PlacementError, TooFewDevices
from mrl.registry import load_attribute

_POLL_S = 0.5
_MAX_CALLS = 1000
"""Number of calls that an agent may have under way."""


@dataclass(frozen=True)
class NodeInfo:
    """A live node, the number of its devices, and its address in Ray."""

    node_id: str
    name: str
    devices: int
    address: str


def offered_nodes(device: str) -> list[NodeInfo]:
    """Return the live nodes, sorted by name."""
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
    """Wait until all named nodes are up with their devices. At the deadline, raise an error that names the others."""
    began = time.monotonic()
    while True:
        devices_of = {offer.name: offer.devices for offer in offered_nodes(device)}
        absent = [name for name in names if name not in devices_of]
        short = [name for name in names if devices_of.get(name, devices_per_node) < devices_per_node]
        if not absent and not short:
            return
        if time.monotonic() - began > deadline_s:
            missing = [f"{name} has not joined" for name in absent]
            missing += [f"{name} offers {devices_of[name]} of {devices_per_node} devices" for name in short]
            problem = f"{len(missing)} of {len(names)} nodes are not ready after {deadline_s:g} s: {'; '.join(missing)}"
            raise TooFewDevices(problem, len(names) - len(missing), fix="check the logs of these nodes")
        time.sleep(_POLL_S)


def run_on_nodes(node_ids: Sequence[str], probe: str, arguments: Sequence[Any], deadline_s: float) -> list[Any]:
    """Run the function `package.module:name` on each of these nodes. Return its results."""
    task = ray.remote(num_cpus=0, max_retries=0)(_call)
    strategies = [NodeAffinitySchedulingStrategy(node_id, soft=False) for node_id in node_ids]
    references = [task.options(scheduling_strategy=strategy).remote(probe, list(arguments)) for strategy in strategies]
    return node_answers(references, deadline_s, fix="check that all nodes have the same version of mrl")


def node_answers(references: Sequence[ObjectRef], deadline_s: float, fix: str) -> list[Any]:
    """Wait for the nodes' answers and return them, one for each reference."""
    try:
        answers: list[Any] = ray.get(list(references), timeout=deadline_s)
    except RayError as error:
        raise PlacementError(f"a node did not answer: {str(error).strip().splitlines()[-1]}", fix=fix) from error
    return answers


def _call(probe: str, arguments: list[Any]) -> Any:
    return load_attribute(probe)(*arguments)


LINK_FIX = (
    "open TCP between these nodes, on all ports; if the interface is wrong, start Ray with --node-ip-address on "
    "another one, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
)
_CONNECT_S = 5.0
_MAX_SAID = 8
ALL_PAIRS = 64
"""Largest number of nodes of which each tries to reach all others."""


@dataclass(frozen=True)
class LinkedNode:
    """A node with an agent, and its address in Ray."""

    name: str
    address: str
    agent: Any


def start_agent(node_id: str) -> Any:
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    options = {"num_cpus": 0, "scheduling_strategy": strategy, "concurrency_groups": {CONCURRENCY_GROUP: _MAX_CALLS}}
    return ray.remote(**options)(NodeAgent).remote()


@contextmanager
def linked_nodes(offers: Sequence[NodeInfo]) -> Iterator[list[LinkedNode]]:
    """Start an agent on each of these nodes for the length of the block."""
    nodes = [LinkedNode(offer.name, offer.address, start_agent(offer.node_id)) for offer in offers]
    try:
        yield nodes
    finally:
        for node in nodes:
            ray.kill(node.agent)


def broken_links(nodes: Sequence[LinkedNode], deadline_s: float) -> list[str]:
    """Return which nodes cannot reach which others, where, and why, for the first few. All links are tested at once.

    Nodes with the same address are one machine, which needs no network to reach itself.
    """
    if len({node.address for node in nodes}) < 2:
        return []
    listening = _ask([node.agent.listen.remote(node.address) for node in nodes], deadline_s)
    for node in (node for node, endpoints in zip(nodes, listening, strict=True) if not endpoints):
        problem = f"Ray knows node {node.name} as {node.address}, but none of its interfaces has this address"
        raise PlacementError(problem, fix="start Ray there with --node-ip-address and an address of that node")
    distances = link_distances(len(nodes))
    pairs = [
        [
            (target, end)
            for number in sorted((place + distance) % len(nodes) for distance in distances)
            for target, ends in [(nodes[number], listening[number])]
            for end in ends
            if target.address != node.address
        ]
        for place, node in enumerate(nodes)
    ]
    references = [
        node.agent.failures.remote([end for _, end in targets], _CONNECT_S)
        for node, targets in zip(nodes, pairs, strict=True)
    ]
    answers = _ask(references, deadline_s)
    _ask([node.agent.stop_listening.remote() for node in nodes], deadline_s)
    broken = [
        f"{node.name} cannot reach {target.name} at {end.address} ({end.interface}): {problem}"
        for node, targets, reasons in zip(nodes, pairs, answers, strict=True)
        for (target, end), reason in zip(targets, reasons, strict=True)
        if (problem := _loopback_problem(end) or reason)
    ]
    return broken[:_MAX_SAID] + [f"and {len(broken) - _MAX_SAID} more"] * (len(broken) > _MAX_SAID)


def link_distances(num_nodes: int) -> list[int]:
    """Return the distances, in a circle of all nodes, at which each node tries to reach another one.

    Of many nodes, these are the powers of two: the tests grow with n log n instead of n^2. Each node still dials and is
    dialed, and two parts of the network without a link between them are found, in each direction, for any two parts.
    """
    if num_nodes <= ALL_PAIRS:
        return list(range(1, num_nodes))
    return [1 << power for power in range((num_nodes - 1).bit_length())]


def _loopback_problem(endpoint: Endpoint) -> str:
    """Return a problem if a node listens on its loopback.

    Another node that connects to this address reaches itself. If it happens to listen on the same port, the link would
    seem to work.
    """
    return "this is the loopback of that node" if ip_address(endpoint.address).is_loopback else ""


def _ask(questions: list[Any], deadline_s: float) -> list[Any]:
    return node_answers(questions, deadline_s, fix="check Ray's logs on the nodes")
