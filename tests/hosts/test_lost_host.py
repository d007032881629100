"""One of two hosts is lost in a step: the run reports it, waits for a replacement, and reaches the same metrics.

A link that recovers before its host is declared lost, or that is only slow, causes no restart.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mrl.config.resolved.run_directory import CHECKPOINTS, steps_in
from mrl.events import NodeSilent, PhaseBegin, RunRestarted, read_events
from tests.apart import untimed
from tests.hosts.conftest import TRAINED, metrics_alone, write_run
from tests.hosts.hosts import RAY_PORT, Host, hosts, ray_of, ray_on

RESTARTS_S = 20.0
"""Seconds from the loss to the restart: six heartbeats of two seconds, plus the time to end a run."""


RESTARTS = ("training.max_restarts=2", "deadlines.heartbeat_s=2", "--quiet")


def _config(path: Path, model: Path) -> Path:
    return write_run(
        path,
        model,
        {"pools": {"all": 2}, "roles": {"actor": "all"}},
        batch={"prompts_per_step": 8, "samples_per_prompt": 4, "samples_per_update": 16},
        actor=TRAINED | {"parallel": {"pp": 2}},
        rollout={"engine": "transformers", "max_prompt_tokens": 16, "max_response_tokens": 48},
        training={"steps": 3, "save_every": 1},
    )


PHASES = ("rollout", "old_log_prob", "update_actor", "save")
LOSSES: dict[str, Callable[[Host], None]] = {
    "killed": Host.kill_all,
    "cut": lambda host: host.ip("link", "set", host.interface, "down"),
    "unheard": lambda host: host.drop(receives=False),
    "unreached": lambda host: host.drop(sends=False),
}
SLOW_MBIT_PER_S = 2


@pytest.mark.slow
@pytest.mark.on_demand
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("phase", PHASES)
def test_a_run_that_loses_a_host_waits_for_another(phase: str, loss: str, model: Path, tmp_path: Path) -> None:
    config = _config(tmp_path / "lost.yaml", model)
    run = tmp_path / "runs" / "lost"
    with hosts(["eth0", "ens7"]) as both, ray_on(both, tmp_path, "--num-cpus=1") as address, ThreadPoolExecutor(1) as t:
        cluster = f"cluster={{nodes: 2, devices_per_node: 1, ray_address: '{address}'}}"
        trains = t.submit(
            both[0].mrl, "train", str(config), cluster, *RESTARTS, "deadlines.resources_s=120", cwd=tmp_path
        )
        _await_second_step(run, phase, trains)
        LOSSES[loss](both[1])
        lost = time.time()
        wait_until(lambda: bool(times(run, RunRestarted)) or trains.done(), 60)
        assert not trains.done(), trains.result()
        assert times(run, RunRestarted)[0] - lost < RESTARTS_S
        assert 0 < times(run, NodeSilent)[0] - lost < 5
        wait_until(lambda: not both[1].processes("ray::WorkerHost"), 10)  # workers without a connection end themselves
        both[1].kill_all()
        both[1].heal()
        both[1].ip("link", "set", both[1].interface, "up")
        with ray_of(both[1], f"--address={both[0].address}:{RAY_PORT}", "--num-cpus=1") as again:
            again.await_start(120)
            output = trains.result()
    assert "node node2 (10.77.0.2)" in output or "on node node2" in output
    assert "the run lost a worker or a node: restart 1 of 2, from step" in output
    assert untimed(run) == metrics_alone(config)


def _blip(host: Host) -> None:
    """Drop all packets for one second, less than a heartbeat."""
    host.drop()
    time.sleep(1)
    host.heal()


@pytest.mark.slow
@pytest.mark.on_demand
@pytest.mark.parametrize("trouble", ["blip", "slow"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_link_that_heals_or_is_slow_costs_nothing(phase: str, trouble: str, model: Path, tmp_path: Path) -> None:
    config = _config(tmp_path / "troubled.yaml", model)
    run = tmp_path / "runs" / "troubled"
    with hosts(["eth0", "ens7"]) as both, ray_on(both, tmp_path, "--num-cpus=1") as address, ThreadPoolExecutor(1) as t:
        cluster = f"cluster={{nodes: 2, devices_per_node: 1, ray_address: '{address}'}}"
        trains = t.submit(both[0].mrl, "train", str(config), cluster, *RESTARTS, cwd=tmp_path)
        _await_second_step(run, phase, trains)
        both[1].limit(SLOW_MBIT_PER_S) if trouble == "slow" else _blip(both[1])
        trains.result()
    assert not times(run, RunRestarted)
    assert untimed(run) == metrics_alone(config)


@pytest.mark.slow
@pytest.mark.on_demand
def test_a_run_whose_host_does_not_come_back_goes_on_with_the_one_that_is_left(model: Path, tmp_path: Path) -> None:
    config = _config(tmp_path / "fewer.yaml", model)
    run = tmp_path / "runs" / "fewer"
    with hosts(["eth0", "ens7"]) as both, ray_on(both, tmp_path, "--num-cpus=1") as address, ThreadPoolExecutor(1) as t:
        cluster = f"cluster={{nodes: 2, devices_per_node: 1, ray_address: '{address}'}}"
        fewer = "training.fallback=[cluster.nodes=1, placement.pools.all=1, actor.parallel.pp=1]"
        trains = t.submit(
            both[0].mrl, "train", str(config), cluster, *RESTARTS, "deadlines.resources_s=20", fewer, cwd=tmp_path
        )
        _await_second_step(run, "rollout", trains)
        both[1].kill_all()
        output = trains.result()
    message = "continues with cluster.nodes=1 placement.pools.all=1 actor.parallel.pp=1: restart 2 of 2, from step 1"
    assert message in output
    alone = figures(metrics_alone(config))
    assert figures(untimed(run)) == [pytest.approx(step, rel=1e-4) for step in alone], (
        "another layout rounds differently"
    )


@pytest.mark.slow
@pytest.mark.on_demand
def test_a_run_whose_cluster_is_lost_goes_on_with_the_next(model: Path, tmp_path: Path) -> None:
    config = _config(tmp_path / "head.yaml", model)
    run = tmp_path / "runs" / "head"
    options = ["--head", f"--port={RAY_PORT}", "--include-dashboard=False", "--num-cpus=2"]
    with hosts(["eth0"]) as (host,), ThreadPoolExecutor(1) as t:
        with ray_on([host], tmp_path, "--num-cpus=2") as address:
            cluster = f"cluster={{nodes: 1, devices_per_node: 2, ray_address: '{address}'}}"
            trains = t.submit(
                host.mrl, "train", str(config), cluster, *RESTARTS, "deadlines.resources_s=120", cwd=tmp_path
            )
            _await_second_step(run, "rollout", trains)
            (head,) = host.processes("gcs_server")
            os.kill(head, signal.SIGKILL)
        (host.files / "ray_current_cluster").unlink(missing_ok=True)
        wait_until(lambda: bool(times(run, RunRestarted)) or trains.done(), 60)
        assert not trains.done(), trains.result()
        with ray_of(host, *options) as again:
            again.await_start(120)
            output = trains.result()
    assert "restart 1 of 2, from step" in output
    assert untimed(run) == metrics_alone(config)


def figures(metrics: list[dict[str, Any]]) -> list[list[float]]:
    """Return score, response length and gradient norm of each step."""
    names = ("reward/score/mean", "response_length/mean", "actor/grad_norm")
    return [[step[name] for name in names] for step in metrics]


def _await_second_step(run: Path, phase: str, trains: Future[str]) -> None:
    """Wait until the first step is saved and this phase of the second step has begun."""
    wait_until(lambda: trains.done() or (bool(steps_in(run / CHECKPOINTS)) and has_begun(run, phase, step=2)), 300)
    assert not trains.done(), trains.result()


def has_begun(run: Path, phase: str, step: int) -> bool:
    events = (record.event for record in read_events(run / "events.jsonl"))
    return any(isinstance(event, PhaseBegin) and (event.phase, event.step) == (phase, step) for event in events)


def times(run: Path, kind: type) -> list[float]:
    return [record.time for record in read_events(run / "events.jsonl") if isinstance(record.event, kind)]


def wait_until(condition: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"the condition did not hold within {limit_s:g} s"
        time.sleep(0.1)
