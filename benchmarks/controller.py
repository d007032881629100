"""Overhead of the controller: driver time and calls per step for phases that do nothing.

A step has six phases, three without data and three that read a stored column. A bare Ray loop alternates with it in the
same run: it makes the same calls on plain actors, without checks, deadlines or reports. With the most workers, a third
candidate makes the calls through the node's agent, as groups of many ranks do (`benchmarks/controller_scale.py`).

    python benchmarks/controller.py
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.controller_workers import BareWorker
from benchmarks.harness import Benchmark, interleave, parser
from mrl.config.mesh import Mesh
from mrl.config.schema import ClusterConfig, DeadlinesConfig, PlacementConfig
from mrl.controller import RayClassWithInitArgs, RayWorkerGroup, ResourcePoolManager, RunContext, ray_cluster
from mrl.controller.transport import store
from mrl.events import EventLog
from mrl.protocol import DataProto
from mrl.protocol.columns import jagged

import ray  # isort: skip - after mrl.controller, which settles how Ray authenticates

SIZES = (2, 4, 8, 16)
STEPS_PER_REPEAT = 20
ROWS_PER_WORKER, TOKENS_PER_ROW = 8, 512


def batch_of(num_workers: int) -> DataProto:
    """Return a stored column, one part per worker, as a previous phase would have left it."""
    lengths = [TOKENS_PER_ROW] * ROWS_PER_WORKER
    parts = [
        store(
            DataProto.from_dict(
                {"responses": jagged(torch.zeros(sum(lengths), dtype=torch.int32), lengths)},
                row_ids=range(worker * ROWS_PER_WORKER, (worker + 1) * ROWS_PER_WORKER),
            )
        )
        for worker in range(num_workers)
    ]
    return DataProto.concat(parts)


def measure(bench: Benchmark, context: RunContext, num_workers: int, repeats: int) -> None:
    """Compare mrl's step with the bare one, for one number of workers."""
    many_ranks = {"mrl": num_workers + 1} | ({"by node": 2} if num_workers == max(SIZES) else {})
    slots = replace(context.resources.device_slots("actor"), fraction=1 / len(many_ranks))
    worker = RayClassWithInitArgs("benchmarks.controller_workers:IdleWorker")
    groups = {
        name: RayWorkerGroup("actor", worker, Mesh(num_workers), replace(context, many_ranks=many), slots)
        for name, many in many_ranks.items()
    }
    bare: list[Any] = [ray.remote(BareWorker).options(num_cpus=0).remote() for _ in range(num_workers)]
    ray.get([worker.nothing.remote() for worker in bare])
    batch = batch_of(num_workers)
    objects = [shard.stored["responses"].parts[0] for shard in batch.chunk(num_workers)]

    def our_steps(group: RayWorkerGroup) -> None:
        for _ in range(3 * STEPS_PER_REPEAT):
            group.nothing()
            group.read(batch)

    def bare_steps() -> None:
        for _ in range(3 * STEPS_PER_REPEAT):
            ray.get([worker.nothing.remote() for worker in bare])
            ray.get([worker.read.remote(part) for worker, part in zip(bare, objects, strict=True)])

    ours = {name: partial(our_steps, group) for name, group in groups.items()}
    times = interleave(ours | {"bare": bare_steps}, repeats=repeats)
    ours_ms, bare_ms = (1e3 * times[name].median_s / STEPS_PER_REPEAT for name in ("mrl", "bare"))
    bench.row(
        workers=num_workers,
        calls_per_step=6 * num_workers,
        mrl_ms_per_step=ours_ms,
        bare_ms_per_step=bare_ms,
        mrl_spread_ms=1e3 * times["mrl"].spread_s / STEPS_PER_REPEAT,
        bare_spread_ms=1e3 * times["bare"].spread_s / STEPS_PER_REPEAT,
        ratio=ours_ms / bare_ms,
        **({"by_node_ms_per_step": 1e3 * times["by node"].median_s / STEPS_PER_REPEAT} if "by node" in ours else {}),
    )
    bench.goal(f"{num_workers} workers: driver time over the bare loop", ours_ms / bare_ms, at_most=1.5)
    for group in groups.values():
        group.shutdown()
    for process in bare:
        ray.kill(process)


def main() -> int:
    """Measure, print the results, and return whether the goals are met."""
    arguments = parser(__doc__ or "").parse_args()
    bench = Benchmark("controller")
    cluster, deadlines = ClusterConfig(devices_per_node=max(SIZES), device="cpu"), DeadlinesConfig()
    with tempfile.TemporaryDirectory() as directory, ray_cluster(cluster):
        events = EventLog(Path(directory) / "events.jsonl")
        for num_workers in SIZES:
            placement = PlacementConfig(pools={"all": num_workers}, roles={"actor": "all"})
            resources = ResourcePoolManager(placement, cluster, deadlines)
            resources.create(Path(directory), events)
            measure(bench, RunContext(Path(directory), events, deadlines, resources), num_workers, arguments.repeats)
            resources.release()
    return bench.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())
