"""A host of two is lost in a step: the run says so, waits for one in its place, and comes to the same figures."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mrl.config.run_directory import CHECKPOINTS, steps_in
from mrl.events import NodeSilent, PhaseBegin, RunRestarted, read_events
from tests.apart import untimed
from tests.hosts.conftest import TRAINED, metrics_alone, write_run
from tests.hosts.hosts import RAY_PORT, Host, hosts, ray_of, ray_on

RESTARTS_S = 20.0
"""From the loss on: six heartbeats of two seconds, and what the end of a run takes."""


def _cut(host: Host) -> None:
    host.ip("link", "set", host.interface, "down")


@pytest.mark.slow
@pytest.mark.on_demand
@pytest.mark.parametrize(("phase", "lose"), [("rollout", Host.kill_all), ("update_actor", _cut)], ids=["killed", "cut"])
def test_a_run_that_loses_a_host_waits_for_another(
    phase: str, lose: Callable[[Host], None], model: Path, tmp_path: Path
) -> None:
    settings = {
        "batch": {"prompts_per_step": 8, "samples_per_prompt": 4, "samples_per_update": 16},
        "actor": TRAINED | {"parallel": {"pp": 2}},
        "rollout": {"engine": "transformers", "max_prompt_tokens": 16, "max_response_tokens": 96},
        "training": {"steps": 3, "save_every": 1},
    }
    config = write_run(tmp_path / "lost.yaml", model, {"pools": {"all": 2}, "roles": {"actor": "all"}}, **settings)
    run = tmp_path / "runs" / "lost"
    with hosts(["eth0", "ens7"]) as both, ray_on(both, tmp_path, "--num-cpus=1") as address, ThreadPoolExecutor(1) as t:
        cluster = f"cluster={{nodes: 2, devices_per_node: 1, ray_address: '{address}'}}"
        restarts = ("training.max_restarts=2", "deadlines={resources_s: 120, heartbeat_s: 2}", "--quiet")
        trains = t.submit(both[0].mrl, "train", str(config), cluster, *restarts, cwd=tmp_path)
        _await(lambda: bool(steps_in(run / CHECKPOINTS)) and _has_begun(run, phase, step=2), 300)
        lose(both[1])
        lost = time.time()
        _await(lambda: bool(_times(run, RunRestarted)) or trains.done(), 60)
        assert not trains.done(), trains.result()
        assert _times(run, RunRestarted)[0] - lost < RESTARTS_S
        assert 0 < _times(run, NodeSilent)[0] - lost < 5
        _await(lambda: not both[1].processes("ray::WorkerHost"), 10)  # whoever is out of reach has ended itself
        both[1].kill_all()
        both[1].ip("link", "set", both[1].interface, "up")
        with ray_of(both[1], f"--address={both[0].address}:{RAY_PORT}", "--num-cpus=1") as again:
            again.await_start(120)
            said = trains.result()
    assert "node node2 (10.77.0.2)" in said or "on node node2" in said
    assert "the run lost a worker or a node: restart 1 of 2, from step" in said
    assert untimed(run) == metrics_alone(config)


def _has_begun(run: Path, phase: str, step: int) -> bool:
    events = (each.event for each in read_events(run / "events.jsonl"))
    return any(isinstance(event, PhaseBegin) and (event.phase, event.step) == (phase, step) for event in events)


def _times(run: Path, kind: type) -> list[float]:
    return [each.time for each in read_events(run / "events.jsonl") if isinstance(each.event, kind)]


def _await(true: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.1)
