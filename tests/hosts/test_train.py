"""Training over two hosts with separate addresses, where a host resolves its own name to 127.0.1.1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mrl.events import NetworkChosen, PoolReady, read_events
from tests.apart import untimed
from tests.hosts.conftest import TRAINED, metrics_alone, over_both, write_run
from tests.hosts.hosts import Host

ON_DEMAND = (pytest.mark.slow, pytest.mark.on_demand)
Run = dict[str, Any]
ACTOR_OVER_BOTH: Run = {
    "placement": {"pools": {"all": 4}, "roles": {"actor": "all"}},
    "actor": TRAINED | {"parallel": {"tp": 2, "pp": 2}},
}
ENGINES_APART: Run = {
    "placement": {"pools": {"train": 2, "engines": 1}, "roles": {"actor": "train", "rollout": "engines"}},
    "actor": TRAINED | {"parallel": {"tp": 2}},
}
ENGINES_ON_BOTH: Run = {
    "placement": {"pools": {"train": 1, "engines": 3}, "roles": {"actor": "train", "rollout": "engines"}},
    "actor": TRAINED,
}
CRITIC_APART: Run = {
    "placement": {"pools": {"policy": 2, "value": 2}, "roles": {"actor": "policy", "critic": "value"}},
    "algorithm": {"advantage": "gae", "kl": {"where": "both", "coef": 0.01}},
    "actor": TRAINED | {"parallel": {"tp": 2}},
    "critic": TRAINED | {"parallel": {"pp": 2}},
}


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(ACTOR_OVER_BOTH, id="actor tp 2 pp 2 over both", marks=ON_DEMAND),
        pytest.param(ENGINES_APART, id="engines on the second", marks=ON_DEMAND),
        pytest.param(ENGINES_ON_BOTH, id="engines on both", marks=ON_DEMAND),
        pytest.param(CRITIC_APART, id="critic on the second", marks=ON_DEMAND),
    ],
)
def test_a_run_over_two_hosts_is_the_run_of_one(
    run: Run, model: Path, cluster: tuple[Host, str], tmp_path: Path
) -> None:
    head, address = cluster
    config = write_run(tmp_path / "two.yaml", model, **run)
    head.mrl("train", str(config), over_both(address), "--quiet", cwd=tmp_path)
    events = [record.event for record in read_events(tmp_path / "runs" / "two" / "events.jsonl")]
    nodes = {node for event in events if isinstance(event, PoolReady) for node in event.nodes}
    assert nodes == {"node1", "node2"}
    networks = {event.node: event for event in events if isinstance(event, NetworkChosen)}
    assert {node: (network.address, network.chosen) for node, network in networks.items()} == {
        "node1": ("10.77.0.1", {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"}),
        "node2": ("10.77.0.2", {"GLOO_SOCKET_IFNAME": "ens7", "NCCL_SOCKET_IFNAME": "=ens7"}),
    }
    both = untimed(tmp_path / "runs" / "two")
    assert len(both) == 2
    assert all(step["actor/grad_norm"] > 1e-3 for step in both)
    assert both == metrics_alone(config)
