from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from mrl.config.schema import ClusterConfig, DeadlinesConfig, PlacementConfig
from mrl.controller import ResourcePoolManager, RunContext, ray_cluster
from mrl.controller.resource_pool import _natural
from mrl.errors import PlacementError, TooFewDevices
from mrl.events import PoolReady, read_events
from tests.conftest import NUM_DEVICES

ROOT = Path(__file__).resolve().parents[2]


def test_devices_are_ordered_and_on_a_node_that_has_a_name(run_context: RunContext) -> None:
    pool = run_context.resources.get_resource_pool("actor")
    assert [device.bundle for device in pool.devices] == list(range(NUM_DEVICES))
    assert len({device.node_id for device in pool.devices}) == 1
    ready = next(record.event for record in read_events(run_context.events.path) if isinstance(record.event, PoolReady))
    assert (ready.pool, ready.devices, len(ready.nodes)) == ("all", NUM_DEVICES, 1)


def test_roles_that_share_a_pool_share_its_devices(run_context: RunContext) -> None:
    assert run_context.resources.device_slots("actor").fraction == 0.333, (
        "actor, critic, and the engines with the actor"
    )
    placement = PlacementConfig(pools={"all": 2}, roles=dict.fromkeys("abc", "all"))
    cluster = ClusterConfig(devices_per_node=2, device="cpu")
    assert 3 * ResourcePoolManager(placement, cluster, DeadlinesConfig()).device_slots("a").fraction <= 1


def test_a_role_without_a_pool_is_named(run_context: RunContext) -> None:
    with pytest.raises(PlacementError, match='the role "actr" has no pool\n  fix: did you mean "actor"'):
        run_context.resources.get_resource_pool("actr")


def test_missing_devices_are_named_at_the_deadline(run_context: RunContext) -> None:
    cluster = ClusterConfig(nodes=3, devices_per_node=2, device="cpu", ray_address="auto")
    placement = PlacementConfig(pools={"train": 4, "score": 2}, roles={"actor": "train", "critic": "score"})
    manager = ResourcePoolManager(placement, cluster, DeadlinesConfig(resources_s=1))
    with pytest.raises(TooFewDevices) as caught:
        manager.create(run_context.run_directory, run_context.events)
    assert caught.value.num_nodes == 1
    message = str(caught.value)
    assert message.startswith("Ray did not provide all devices within 1 s\n")
    assert 'pool "train": 4 CPU slots on 2 nodes; still waiting for 2 + 2, each on one node' in message
    assert 'pool "score": 2 CPU slots on 1 node; still waiting for 2, each on one node' in message
    assert f"Ray has {NUM_DEVICES} CPU on 1 nodes, 0 of them free:" in message
    assert "2 of 3 nodes have not joined" in message
    assert (
        "fix: add or free the nodes listed above, or make the pools smaller: `mrl plan CONFIG --search --nodes 1`"
        in message
    )


def test_nodes_are_ordered_as_people_number_them() -> None:
    names = ["node-10", "node-2", "node-1", "head"]
    assert sorted(names, key=_natural) == ["head", "node-1", "node-2", "node-10"]


def test_ray_started_here_is_behind_a_token(run_context: RunContext) -> None:
    """Without the token, even a request for the cluster's name fails."""
    import ray

    address = ray.get_runtime_context().gcs_address
    code = f"from ray._raylet import GcsClient\nGcsClient(address={address!r})"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    for credentials in ({}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}):
        tried = subprocess.run(
            [sys.executable, "-c", code], env=environment | credentials, capture_output=True, text=True, timeout=60
        )
        assert tried.returncode != 0
        assert "InvalidAuthToken" in tried.stderr or "Unauthenticated" in tried.stderr


def test_ray_started_here_keeps_its_files_and_its_dashboard_to_itself(run_context: RunContext) -> None:
    import ray
    from ray._private.worker import _global_node

    private = Path(_global_node.get_session_dir_path()).parents[1]
    assert private.name.startswith("mrl-")
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert stat.S_IMODE((private / "token").stat().st_mode) == 0o600
    assert not ray._private.worker.global_worker.node.address_info["webui_url"], "there is no dashboard"


@pytest.mark.parametrize(
    ("cluster", "mode", "message"),
    [
        (ClusterConfig(nodes=2, devices_per_node=1, device="cpu"), "token", "cluster.nodes is 2, but without"),
        (
            ClusterConfig(devices_per_node=1, device="cpu", ray_address="10.0.0.1:6379"),
            "disabled",
            "the Ray cluster at 10.0.0.1:6379 does not use token authentication",
        ),
        (ClusterConfig(devices_per_node=1, device="cpu"), "disabled", "would be started without token authentication"),
    ],
)
def test_an_unsafe_or_impossible_ray_is_refused(
    cluster: ClusterConfig, mode: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    with pytest.raises(PlacementError, match=message), ray_cluster(cluster):
        pass


@pytest.mark.slow
def test_two_nodes_and_the_loss_of_one(tmp_path: Path) -> None:
    """A real Ray cluster of two raylets, joined by address: ranks in node order, and an error for a lost node."""
    ran = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "controller" / "two_nodes.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        env={name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        # The ranks share their session, and so their cores, with other tests. Ray would start them at
        # niceness 15, and a busy neighbor would starve them.
        | {"PYTHONPATH": str(ROOT), "RAY_worker_niceness": "0"},
    )
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout.splitlines()[-1])
    assert report["nodes_of_ranks"] == [0, 0, 1, 1]
    assert report["local_ranks"] == [0, 1, 0, 1]
    assert report["sums"] == [6.0] * 4
    assert report["tokens"] == [18, 15], "rows crossed between the nodes"
    assert report["error"] == "WorkerDied"
    assert report["lost_ranks"] == report["expected"]
    assert report["message"].startswith(f"actor rank {report['expected'][0]} (tp0 dp")
    assert "its node does not answer: the whole node may be lost" in report["message"]
    assert report["seconds"] < 60
