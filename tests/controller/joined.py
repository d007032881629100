"""Run by test_node_watch.py: joins the Ray cluster at an address, prints a line, and waits."""

from __future__ import annotations

import sys
import time

from mrl.config.schema import ClusterConfig
from mrl.controller import node_watch
from mrl.controller.cluster import ray_cluster, when_ray_is_lost
from mrl.errors import WorkerDied


def say(error: WorkerDied) -> int:
    print(error.what, flush=True)
    return 76


if __name__ == "__main__":
    node_watch._HEAD_S = 5.0  # half a minute is for clusters that are busy
    config = ClusterConfig(nodes=1, devices_per_node=1, device="cpu", ray_address=sys.argv[1])
    with when_ray_is_lost(say), ray_cluster(config):
        print("joined", flush=True)
        time.sleep(50)
