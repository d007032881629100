"""Run by test_death.py in its own mount namespace with a small /dev/shm: a worker fills it, and dies."""

from __future__ import annotations

import sys
from pathlib import Path

from mrl.config.mesh import Mesh
from mrl.config.schema import ClusterConfig, DeadlinesConfig, PlacementConfig
from mrl.controller import RayClassWithInitArgs, RayWorkerGroup, ResourcePoolManager, RunContext, ray_cluster
from mrl.errors import WorkerError
from mrl.events import EventLog


def main(directory: Path) -> None:
    """Print the text that the user would read."""
    config = ClusterConfig(devices_per_node=1, device="cpu")
    deadlines = DeadlinesConfig(start_s=120, call_s=60, heartbeat_s=1, release_s=1)
    with ray_cluster(config):
        events = EventLog(directory / "events.jsonl")
        resources = ResourcePoolManager(PlacementConfig(pools={"all": 1}, roles={"actor": "all"}), config, deadlines)
        resources.create(directory, events)
        worker = RayClassWithInitArgs("tests.rank_workers:RankWorker")
        group = RayWorkerGroup("actor", worker, Mesh(1), RunContext(directory, events, deadlines, resources))
        try:
            group.fill_shared_memory()
        except WorkerError as error:
            print(error)
        resources.release()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
