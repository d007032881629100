"""A look at the nodes of a Ray cluster that has been joined: who is there, what they offer, what they are like."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

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
    """Return the devices that no running work holds."""
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
