"""A SIGTERM handler from before Ray's start still works afterwards: a run uses it to save."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import os, signal
from mrl.config.schema import ClusterConfig
from mrl.controller.cluster import ray_cluster, ray_cluster_soon

heard = []
signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
cluster = ClusterConfig(devices_per_node=1, device="cpu")
with ray_cluster_soon(cluster), ray_cluster(cluster):
    os.kill(os.getpid(), signal.SIGTERM)
    print("continued", *heard)
"""


def test_ray_leaves_sigterm_to_whoever_listened() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment | {"PYTHONPATH": str(ROOT)},
    )
    assert (ran.returncode, ran.stdout) == (0, "continued 15\n"), ran.stderr
    assert "SIGTERM" not in ran.stderr
