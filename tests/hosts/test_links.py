"""The simulated hosts, and the messages for hosts that cannot reach each other."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from mrl.events import WorkersStarted, read_events
from tests.hosts.conftest import TRAINED, write_run
from tests.hosts.hosts import hosts, ray_on

PLACEMENT = {"pools": {"all": 3}, "roles": {"actor": "all"}}
LOOK = """
from mrl.controller.network import failures, interfaces, listen, listen_everywhere, Endpoint
own = interfaces()
print(own["10.77.0.1"], own["10.88.0.1"], own["fd00::1"], own["127.0.0.1"])
print([endpoint.interface for _, endpoint in listen_everywhere("10.77.0.1")], listen_everywhere("10.77.0.2"))
with listen("fd00::1") as there:
    port = there.getsockname()[1]
    print(failures([Endpoint("fd00::1", port, ""), Endpoint("10.77.0.1", port, ""), Endpoint("10.77.0.9", 1, "")], 0.2))
"""


def test_addresses_of_a_host_and_the_interfaces_that_carry_them() -> None:
    with hosts(["eth0", "ens7"]) as (first, second):
        assert first.run("getent", "hosts", "node1").stdout.split() == ["127.0.1.1", "node1"]
        assert second.run("getent", "hosts", "node1").stdout.split() == ["10.77.0.1", "node1"]
        assert second.run("hostname").stdout == "node2\n"
        first.ip("addr", "add", "10.88.0.1/24", "dev", "eth0")
        first.ip("addr", "add", "fd00::1/64", "dev", "eth0", "nodad")
        first.environment["GLOO_SOCKET_IFNAME"] = "lo"
        ran = first.run(sys.executable, "-c", LOOK)
        assert ran.stdout.splitlines() == [
            "eth0 eth0 eth0 lo",
            "['eth0', 'lo'] []",
            "['', 'Connection refused', 'no answer within 0.2 s']",
        ], ran.stderr
    assert not Path(f"/proc/{first.pid}").exists()


@pytest.mark.slow
def test_pairs_of_hosts_that_do_not_reach_each_other_are_named(tmp_path: Path, model: Path) -> None:
    """Node 2 cannot send to node 3, both reach the head, and gloo would listen on the loopback of node 1."""
    batch = {"prompts_per_step": 3, "samples_per_prompt": 4, "samples_per_update": 12}
    config = write_run(tmp_path / "run.yaml", model, PLACEMENT, actor=TRAINED, batch=batch)
    with hosts(["eth0", "eth0", "ens7"]) as three:
        three[0].environment["GLOO_SOCKET_IFNAME"] = "lo"
        three[1].ip("route", "add", "unreachable", "10.77.0.3")
        with ray_on(three, tmp_path, "--num-cpus=1") as address:
            cluster = f"cluster={{nodes: 3, devices_per_node: 1, ray_address: '{address}'}}"
            output = three[0].mrl("check", str(config), cluster, cwd=tmp_path, code=2)
            refused = three[0].mrl("train", str(config), cluster, cwd=tmp_path, code=1)
    expected = [
        "node2 cannot reach node1 at 127.0.0.1 (lo): this is the loopback of that node",
        "node2 cannot reach node3 at 10.77.0.3 (ens7): No route to host",
        "node3 cannot reach node1 at 127.0.0.1 (lo): this is the loopback of that node",
        "node3 cannot reach node2 at 10.77.0.2 (eth0): no answer within 5 s",
    ]
    assert re.findall(r"fail +network: (.*)", output) == expected
    assert "open TCP between these nodes" in output
    assert re.findall(r"node\d cannot reach .*", refused) == expected
    events = [record.event for record in read_events(tmp_path / "runs" / "run" / "events.jsonl")]
    assert not [event for event in events if isinstance(event, WorkersStarted)], "the run started workers"
