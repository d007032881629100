"""A separate process for test_nodes.py: two raylets, each with its own cache of the hub."""

from __future__ import annotations

import json
import os
import secrets
import sys
from dataclasses import replace
from pathlib import Path

import mrl.controller  # noqa: F401 - before ray: it settles how Ray authenticates
from mrl.config.schema import ClusterConfig, DeadlinesConfig, ModelConfig, PlacementConfig
from mrl.controller import ResourcePoolManager, ray_cluster
from mrl.controller.nodes import run_on_nodes
from mrl.errors import ModelError
from mrl.events import EventLog
from mrl.trainer.nodes import fetch_models
from tests.trainer.fakes import make_config


def main(directory: Path, snapshot: str, endpoint: str) -> None:
    """Start the nodes, bring the models to both, and print where each has them."""
    (directory / "token").write_text(secrets.token_hex(32))
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(directory / "token")
    os.environ |= {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0"}
    from ray.cluster_utils import Cluster

    # The second node cannot see the driver's cache, as if it were on another machine's disk: its cache is elsewhere.
    hidden = snapshot.replace("/first/", "/first-of-the-driver/")
    os.environ["HF_HUB_CACHE"] = str(directory / "first")
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    os.environ["HF_HUB_CACHE"] = str(directory / "second")
    nodes.add_node(num_cpus=1)
    cluster = ClusterConfig(nodes=2, devices_per_node=1, device="cpu", ray_address=nodes.address)
    placement = PlacementConfig(pools={"all": 2}, roles={"actor": "all"})
    config = replace(make_config(directory), cluster=cluster, placement=placement, model=ModelConfig(path=hidden))
    with ray_cluster(cluster):
        events = EventLog(directory / "events.jsonl")
        resources = ResourcePoolManager(placement, cluster, DeadlinesConfig())
        resources.create(directory, events)
        fetch_models(config, resources, events)
        ids = [node.node_id for node in resources.nodes]
        report = {"copies": sorted(map(str, run_on_nodes(ids, "mrl.hub:node_copy", [hidden], 60)))}
        absent = replace(config, model=ModelConfig(path=str(Path(hidden).with_name("0" * 40))))
        try:
            fetch_models(absent, resources, events)
        except ModelError as error:
            report["error"] = error.what
    print(json.dumps(report))
    nodes.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
