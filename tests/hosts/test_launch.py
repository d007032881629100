"""Jobs over two hosts: the unchanged batch script with a task on each host, and a job on a Ray cluster."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from mrl.events import NetworkChosen, PoolReady, read_events
from tests.apart import untimed
from tests.hosts.conftest import metrics_alone, write_run
from tests.hosts.hosts import hosts, ray_on
from tests.hosts.test_train import ACTOR_OVER_BOTH
from tests.launch.conftest import ROOT, Place

SITE = f"""\
time: "1:00:00"
cpus_per_node: 2
python: {sys.executable}
network_interface: eth0
join_limit_s: 240
environment: {{OMP_NUM_THREADS: "1", PYTHONPATH: {ROOT}}}
"""
OVER_BOTH = "cluster={nodes: 2, devices_per_node: 2, ray_address: auto}"


@pytest.mark.slow
@pytest.mark.on_demand
def test_the_batch_script_over_two_hosts(place: Place, model: Path) -> None:
    (place.directory / "cluster.yaml").write_text(SITE)
    config = write_run(place.directory / "two.yaml", model, **ACTOR_OVER_BOTH)
    with hosts(["eth0", "eth0"]) as both:
        enter = {host.name: host.prefix(place.directory) for host in both}
        (place.directory / "slurm" / "hosts").write_text(json.dumps(enter))
        place.mrl("launch", "slurm", "two.yaml", OVER_BOTH, "--submit")
        place.wait_for(place.job() / "gone", 500)
        assert (place.job() / "ended").read_text() == "0\n", place.words()
    run = place.directory / "runs" / "two"
    named = [record.event for record in read_events(run / "events.jsonl") if isinstance(record.event, NetworkChosen)]
    assert [(event.node, event.address) for event in named] == [("node1", "10.77.0.1"), ("node2", "10.77.0.2")]
    assert all(event.of_site == {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"} for event in named)
    assert not any(event.chosen for event in named), "the site's settings are kept"
    assert untimed(run) == metrics_alone(config)


@pytest.mark.slow
@pytest.mark.on_demand
def test_a_job_of_a_ray_cluster_over_two_hosts(model: Path, tmp_path: Path) -> None:
    config = write_run(tmp_path / "two.yaml", model, **ACTOR_OVER_BOTH)
    with hosts(["eth0", "ens7"]) as both, ray_on(both, tmp_path, "--num-cpus=2", dashboard=True):
        both[1].names.write_text("127.0.0.1 localhost\n")  # its name does not resolve
        await_dashboard = "until (: </dev/tcp/127.0.0.1/8265) 2>/dev/null; do sleep 0.2; done"
        both[0].run("bash", "-c", await_dashboard, timeout_s=120)
        both[0].mrl("launch", "ray", str(config), OVER_BOTH, "--address", "http://127.0.0.1:8265", cwd=tmp_path)
    run = tmp_path / "runs" / "two"
    pools = [record.event for record in read_events(run / "events.jsonl") if isinstance(record.event, PoolReady)]
    assert [pool.nodes for pool in pools] == [["node1", "node2"]]
    assert untimed(run) == metrics_alone(config)
