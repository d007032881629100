"""Driver's cost of a GRPO step's calls to 64, 1,024 and 4,096 ranks, called one by one and through their nodes.

A few real processes stand for all ranks, and a few real agents for all nodes of eight ranks. A step has four calls
without data, as for offloading and sending weights, and six with shards, three of which write a column. The driver's
cost is the processor time of its process with all threads. Seconds on the clock are longer than on a cluster, because
all ranks and agents share the cores of this machine with the driver.

    python benchmarks/controller_scale.py
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.controller_workers import IdleWorker, StandIn
from benchmarks.harness import Benchmark, parser
from mrl.config.mesh import Mesh
from mrl.config.schema import ClusterConfig, DeadlinesConfig, PlacementConfig
from mrl.controller import (
    DeviceSlots,
    RayClassWithInitArgs,
    RayWorkerGroup,
    ResourcePoolManager,
    RunContext,
    ray_cluster,
)
from mrl.controller.nodes import start_agent
from mrl.controller.processes import NodeView
from mrl.controller.resource_pool import Device
from mrl.controller.transport import store
from mrl.controller.worker import MethodSpec, registered_methods
from mrl.controller.worker_host import ProcessInfo
from mrl.events import EventLog
from mrl.protocol import DataProto
from mrl.protocol.columns import jagged

import ray  # isort: skip - after mrl.controller, which settles how Ray authenticates

SIZES = (64, 1024, 4096)
MAX_REPEATED = 1024
"""Number of ranks above which a step is made once: it takes a minute."""
RANKS_PER_NODE, RANKS_PER_SHARD = 8, 32
NUM_PROCESSES, NUM_AGENTS = 4, 4
ROWS_PER_SHARD, TOKENS_PER_ROW = 8, 512
STEP_S = 511.8
"""Planned seconds of a step of configs/grpo-llama3.1-70b-8n8g.yaml (`mrl plan`)."""
SHARE = 0.05
MANY, ALL_DIRECT = 2, 1 << 30


class StandInGroup(RayWorkerGroup):
    """A group whose ranks are a few processes, on nodes whose agents are a few processes."""

    def __init__(
        self, ranks: Sequence[Any], nodes: Sequence[NodeView], world_size: int, context: RunContext, role: str
    ) -> None:
        self._ranks, self._nodes, self._made = ranks, nodes, count()
        devices: list[Any] = [None] * world_size
        mesh = Mesh(world_size, tp=8, pp=RANKS_PER_SHARD // 8)
        worker = RayClassWithInitArgs("benchmarks.controller_workers:IdleWorker")
        super().__init__(role, worker, mesh, context, DeviceSlots(devices, 1.0, "stand-ins"))

    def _make_actor(self, device: Device) -> Any:
        return self._ranks[next(self._made) % len(self._ranks)]

    def _node(self, rank: int) -> NodeView:
        return self._nodes[rank // RANKS_PER_NODE]

    def _start(self, worker: RayClassWithInitArgs, hellos: list[ProcessInfo]) -> dict[str, MethodSpec]:
        return registered_methods(IdleWorker)


@dataclass(frozen=True)
class Cost:
    """Cost of one step: the driver's processor time, and seconds on the clock."""

    cpu_s: float
    wall_s: float


def batch_of(num_shards: int) -> DataProto:
    """Return a stored column, one part per shard, as engines would have left it."""
    lengths = [TOKENS_PER_ROW] * ROWS_PER_SHARD
    column = jagged(torch.zeros(sum(lengths), dtype=torch.int32), lengths)
    parts = [
        store(DataProto.from_dict({"responses": column}, row_ids=range(first, first + ROWS_PER_SHARD)))
        for first in range(0, num_shards * ROWS_PER_SHARD, ROWS_PER_SHARD)
    ]
    return DataProto.concat(parts)


def step(group: RayWorkerGroup, batch: DataProto) -> Cost:
    """Make the calls of a step."""
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    for _ in range(4):
        group.nothing()
    for _ in range(3):
        group.read(batch)
        group.write(batch)
    return Cost(time.process_time() - cpu_s, time.perf_counter() - wall_s)


def measure(bench: Benchmark, context: RunContext, world_size: int, repeats: int) -> None:
    """Compare calls one by one with calls through nodes, in turns."""
    home = context.resources.nodes[0]
    agents = [start_agent(home.node_id) for _ in range(NUM_AGENTS)]
    nodes = [
        replace(home, node_id=f"node-{number}", agent=agents[number % NUM_AGENTS])
        for number in range(world_size // RANKS_PER_NODE)
    ]
    ranks = [ray.remote(StandIn).options(num_cpus=0).remote() for _ in range(NUM_PROCESSES)]
    ray.get([rank.become.remote(world_size) for rank in ranks])
    groups = {
        name: StandInGroup(ranks, nodes, world_size, replace(context, many_ranks=many_ranks), name)
        for name, many_ranks in (("one_by_one", ALL_DIRECT), ("by_node", MANY))
    }
    batch = batch_of(world_size // RANKS_PER_SHARD)
    costs: dict[str, list[Cost]] = {name: [] for name in groups}
    for group in groups.values():
        group.nothing()
        group.write(batch)
    for _ in range(repeats if world_size <= MAX_REPEATED else 1):
        for name, group in groups.items():
            costs[name].append(step(group, batch))
    cells = {
        f"{name}_{what}": median(getattr(cost, what) for cost in costs[name])
        for name in groups
        for what in ("cpu_s", "wall_s")
    }
    bench.row(ranks=world_size, nodes=len(nodes), shards=world_size // RANKS_PER_SHARD, **cells)
    goal = f"{world_size} ranks: driver's share of a planned 70B step of {STEP_S:g} s"
    bench.goal(goal, cells["by_node_cpu_s"] / STEP_S, at_most=SHARE)
    for process in (*ranks, *agents):
        ray.kill(process)


def main() -> int:
    """Measure, print the results, and return whether the goals are met."""
    options = parser(__doc__ or "", repeats=3)
    options.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of ranks")
    arguments = options.parse_args()
    bench = Benchmark("controller_scale")
    cluster, deadlines = ClusterConfig(devices_per_node=1, device="cpu"), DeadlinesConfig()
    with tempfile.TemporaryDirectory() as directory, ray_cluster(cluster):
        events = EventLog(Path(directory) / "events.jsonl")
        resources = ResourcePoolManager(PlacementConfig(pools={"all": 1}, roles={"actor": "all"}), cluster, deadlines)
        resources.create(Path(directory), events)
        context = RunContext(Path(directory), events, deadlines, resources)
        for world_size in arguments.sizes:
            measure(bench, context, world_size, arguments.repeats)
        resources.release()
    return bench.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())
