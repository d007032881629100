"""Pools of devices, and the assignment of roles to pools."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.exceptions import RayError
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup

from mrl.config.schema import ClusterConfig, DeadlinesConfig, PlacementConfig
from mrl.controller.cluster import lose_ray
from mrl.controller.network import LOOPBACK
from mrl.controller.node_watch import NodeWatch
from mrl.controller.nodes import LINK_FIX, LinkedNode, broken_links, start_agent
from mrl.controller.processes import NodeView
from mrl.errors import PlacementError, TooFewDevices, counted, did_you_mean
from mrl.events import EventLog, NetworkChosen, PoolReady, Warned

_MAX_POLL_S = 0.2


@dataclass(frozen=True)
class Device:
    """One device of a pool: a bundle of a placement group on a node."""

    group: PlacementGroup
    bundle: int
    node_id: str


@dataclass(frozen=True)
class DeviceSlots:
    """Devices for a group's processes: one per rank, and the fraction of it that each process requests from Ray."""

    devices: Sequence[Device]
    fraction: float
    description: str
    """Description of the pool for messages."""
    visible_gpus: Sequence[str] = ()
    """GPUs that each process sees, if they differ from the one it requests."""


class RayResourcePool:
    """A number of devices, packed node by node, in a fixed order by node."""

    def __init__(self, name: str, num_devices: int, devices_per_node: int, kind: str) -> None:
        self.name = name
        self.num_devices = num_devices
        self.kind = kind
        self.devices: list[Device] = []
        full, rest = divmod(num_devices, devices_per_node)
        self._bundles_per_node = [devices_per_node] * full + ([rest] if rest else [])
        self._groups: list[PlacementGroup] = []

    def request(self) -> None:
        """Request the devices from Ray: one group of bundles per node, which Ray must place together."""
        resource = {"CPU": 1.0} if self.kind == "cpu" else {"GPU": 1.0, "CPU": 1.0}
        self._groups = [
            placement_group([dict(resource)] * size, strategy="STRICT_PACK") for size in self._bundles_per_node
        ]

    def waiting(self) -> list[PlacementGroup]:
        """Return the groups that Ray has not placed yet."""
        return [group for group in self._groups if not group.wait(0)]

    def order(self) -> None:
        """Sort the placed devices by node name, so that neighboring ranks are on the same node."""
        names = {node["NodeID"]: (node["NodeManagerHostname"], node["NodeManagerAddress"]) for node in ray.nodes()}
        placed = []
        for group in self._groups:
            nodes = placement_group_table(group)["bundles_to_node_id"]
            node_id = nodes[0]
            placed.append((tuple(map(_natural, names[node_id])), node_id, group))
        placed.sort(key=lambda entry: entry[:2])
        self.devices = [
            Device(group, bundle, node_id) for _, node_id, group in placed for bundle in range(group.bundle_count)
        ]

    def release(self) -> None:
        """Return the devices to Ray. This ends the processes on them."""
        for group in self._groups:
            remove_placement_group(group)
        self._groups, self.devices = [], []

    def describe(self) -> str:
        """Return a description of the pool for messages."""
        nodes = len(self._bundles_per_node)
        kind = "CPU slots" if self.kind == "cpu" else "GPUs"
        return f'pool "{self.name}": {self.num_devices} {kind} on {counted(nodes, "node")}'


class ResourcePoolManager:
    """Maps roles to pools. Creates the pools, waits for Ray up to a deadline, and knows the nodes of the devices."""

    def __init__(self, placement: PlacementConfig, cluster: ClusterConfig, deadlines: DeadlinesConfig) -> None:
        self._placement = placement
        self._cluster = cluster
        self._deadlines = deadlines
        self._nodes: dict[str, NodeView] = {}
        self._watch: NodeWatch | None = None
        self.pools = {
            name: RayResourcePool(name, num_devices, cluster.devices_per_node, cluster.device)
            for name, num_devices in placement.pools.items()
        }

    def create(self, run_directory: Path, events: EventLog) -> None:
        """Place all pools' devices, with one common wait, and start an agent on every node with devices."""
        began = time.monotonic()
        for pool in self.pools.values():
            pool.request()
        while waiting := {name: groups for name, pool in self.pools.items() if (groups := pool.waiting())}:
            if time.monotonic() - began > self._deadlines.resources_s:
                message = self._missing_devices(waiting)
                self.release()
                num_alive = sum(bool(node["Alive"]) for node in ray.nodes())
                search = f"`mrl plan CONFIG --search --nodes {num_alive}` lists layouts that fit on the available nodes"
                fix = f"add or free the nodes listed above, or make the pools smaller: {search}"
                raise TooFewDevices(message, num_alive, fix=fix)
            next(iter(waiting.values()))[0].wait(_MAX_POLL_S)
        for pool in self.pools.values():
            pool.order()
        self._start_agents(run_directory, events)
        self._watch = NodeWatch(self.nodes, self._deadlines.heartbeat_s, events, lose_ray)
        for pool in self.pools.values():
            nodes = list(dict.fromkeys(self._nodes[device.node_id].name for device in pool.devices))
            events.write(PoolReady(pool.name, pool.num_devices, nodes, time.monotonic() - began))

    @property
    def numa_binding(self) -> bool:
        """Whether processes are bound to the CPUs next to their GPUs."""
        return self._cluster.device == "gpu" and self._cluster.numa_binding

    def get_resource_pool(self, role: str) -> RayResourcePool:
        roles: dict[str, str] = {str(name): pool for name, pool in self._placement.roles.items()}
        if role not in roles:
            raise PlacementError(f'the role "{role}" has no pool', fix=did_you_mean(role, roles))
        return self.pools[roles[role]]

    def device_slots(self, role: str) -> DeviceSlots:
        """Return all devices of a role's pool, shared by the pool's roles.

        Engines need another share, next to the actor or, in their own pool, next to the weight receivers.
        """
        pool = self.get_resource_pool(role)
        roles_in_pool = {pool_role for pool_role, name in self._placement.roles.items() if name == pool.name}
        num_sharing = (
            len(roles_in_pool - {"rollout"}) + 1
            if "actor" in roles_in_pool
            else len(roles_in_pool) + ("rollout" in roles_in_pool)
        )
        share = int(1000 / num_sharing) / 1000  # rounded down: three thirds must not exceed one device
        return DeviceSlots(pool.devices, share, pool.describe())

    def node(self, node_id: str) -> NodeView:
        """Return the view of a node that has devices of a pool."""
        return self._nodes[node_id]

    @property
    def nodes(self) -> list[NodeView]:
        return list(self._nodes.values())

    def release(self) -> None:
        if self._watch is not None:
            self._watch.stop()
        for node in self._nodes.values():
            ray.kill(node.agent)
        self._nodes = {}
        for pool in self.pools.values():
            pool.release()

    def _start_agents(self, run_directory: Path, events: EventLog) -> None:
        canary = str(events.path)  # a file of this run that all nodes must see
        node_ids = list(dict.fromkeys(device.node_id for pool in self.pools.values() for device in pool.devices))
        agents = {node_id: start_agent(node_id) for node_id in node_ids}
        address_of = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        # The stores behind these sockets have no passwords: a run on one host uses only the loopback interface.
        if len({address_of[node_id] for node_id in node_ids}) == 1:
            address_of = dict.fromkeys(node_ids, LOOPBACK)
        questions = [
            (
                agent.describe.remote(),
                agent.sees.remote(canary),
                agent.memory.remote(),
                agent.network.remote(address_of[node_id]),
            )
            for node_id, agent in agents.items()
        ]
        try:
            answers = [ray.get(list(question), timeout=self._deadlines.start_s) for question in questions]
        except RayError as error:
            raise PlacementError(
                f"a node's agent did not start: {error}", fix="check Ray's logs on the nodes"
            ) from error
        for (node_id, agent), answer in zip(agents.items(), answers, strict=True):
            (name, authentication), sees, memory, network = answer
            self._nodes[node_id] = NodeView(node_id, name, agent, memory, network)
            if not sees:
                raise PlacementError(
                    f"node {name} cannot see the run directory {run_directory}",
                    fix="put run.dir on a file system shared by all nodes",
                )
            self._check_authentication(name, authentication, events)
            chosen = network.environment()
            events.write(NetworkChosen(name, network.address, network.interface, chosen, network.of_site))
        linked = [LinkedNode(node.name, node.network.address, node.agent) for node in self._nodes.values()]
        if broken := broken_links(linked, self._deadlines.start_s):
            raise PlacementError("\n  ".join(broken), fix=LINK_FIX)

    def _check_authentication(self, node: str, mode: str, events: EventLog) -> None:
        if mode == "token":
            return
        problem = f"Ray on node {node} runs without token authentication (RAY_AUTH_MODE={mode})"
        if not self._cluster.allow_insecure_ray:
            raise PlacementError(
                problem, fix="start Ray with RAY_AUTH_MODE=token, or set cluster.allow_insecure_ray=true"
            )
        events.write(Warned("cluster.allow_insecure_ray", problem))

    def _missing_devices(self, waiting: dict[str, list[PlacementGroup]]) -> str:
        resource = "CPU" if self._cluster.device == "cpu" else "GPU"
        lines = [f"Ray did not provide all devices within {self._deadlines.resources_s:g} s"]
        for name, groups in waiting.items():
            sizes = " + ".join(str(group.bundle_count) for group in groups)
            lines.append(f"  {self.pools[name].describe()}; still waiting for {sizes}, each on one node")
        nodes = ray.nodes()
        alive = [node for node in nodes if node["Alive"]]
        free = ray.available_resources().get(resource, 0)
        total = sum(node["Resources"].get(resource, 0) for node in alive)
        lines.append(f"  Ray has {total:g} {resource} on {len(alive)} nodes, {free:g} of them free:")
        lines += [
            f"    {node['NodeManagerHostname']}: {node['Resources'].get(resource, 0):g} {resource}" for node in alive
        ]
        lines += [f"    {node['NodeManagerHostname']}: lost" for node in nodes if not node["Alive"]]
        if len(alive) < self._cluster.nodes:
            lines.append(f"  {self._cluster.nodes - len(alive)} of {self._cluster.nodes} nodes have not joined")
        return "\n".join(lines)


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts node-2 before node-10."""
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in re.split(r"(\d+)", name)]
