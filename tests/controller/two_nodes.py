"""Run by test_resource_pool.py in a separate process: a cluster of two raylets, one of which is lost."""

from __future__ import annotations

import json
import secrets
import sys
import threading
import time
from pathlib import Path

import mrl.controller  # noqa: F401 - before ray: it settles how Ray authenticates
from mrl.config.mesh import Mesh
from mrl.config.schema import ClusterConfig, DeadlinesConfig, PlacementConfig
from mrl.controller import RayClassWithInitArgs, RayWorkerGroup, ResourcePoolManager, RunContext, ray_cluster
from mrl.errors import WorkerError
from mrl.events import EventLog
from tests.conftest import by_node
from tests.controller.test_worker_group import prompts


def main(directory: Path) -> None:
    """Start the nodes, run the workers, lose a node, and print the observations."""
    import os

    (directory / "token").write_text(secrets.token_hex(32))
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(directory / "token")
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    second = nodes.add_node(num_cpus=2)
    config = ClusterConfig(nodes=2, devices_per_node=2, device="cpu", ray_address=nodes.address)
    deadlines = DeadlinesConfig(resources_s=60, start_s=120, call_s=60, heartbeat_s=5, release_s=1)
    placement = PlacementConfig(pools={"all": 4}, roles={"actor": "all"})
    with ray_cluster(config):
        events = EventLog(directory / "events.jsonl")
        resources = ResourcePoolManager(placement, config, deadlines)
        resources.create(directory, events)
        worker = RayClassWithInitArgs("tests.rank_workers:RankWorker")
        context = by_node(RunContext(directory, events, deadlines, resources))
        group = RayWorkerGroup("actor", worker, Mesh(4, tp=2), context)
        where = group.where()
        order = list(dict.fromkeys(node for node, _ in where))
        batch = prompts().union(group.generate(prompts(), extra=2)).take([5, 0, 4, 1, 3, 2])
        report = {
            "nodes_of_ranks": [order.index(node) for node, _ in where],
            "local_ranks": [local_rank for _, local_rank in where],
            "sums": group.join(),
            "tokens": [shard["tokens"] for shard in group.count(batch)],
        }
        lost = order.index(second.node_id)  # the other node is the head's, and the driver's
        threading.Timer(1.0, lambda: nodes.remove_node(second, allow_graceful=False)).start()
        began = time.monotonic()
        try:
            group.spin_on(0 if lost == 1 else 2)
        except WorkerError as error:
            expected = [2 * lost, 2 * lost + 1]
            report |= {"error": type(error).__name__, "lost_ranks": error.ranks, "expected": expected}
            report |= {"message": str(error)}
        report["seconds"] = time.monotonic() - began
        resources.release()
    print(json.dumps(report))
    nodes.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
