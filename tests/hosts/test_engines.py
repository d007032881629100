"""Engines over two hosts, with one worker on each: the run of one host, and the price of a death on the second host."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mrl.events import ReplicaLost, ReplicaServes, RunRestarted, WorkersStarted, read_events
from tests.apart import untimed
from tests.hosts.conftest import TRAINED, metrics_alone, write_run
from tests.hosts.hosts import RAY_PORT, hosts, ray_of, ray_on
from tests.hosts.test_lost_host import RESTARTS, RESTARTS_S, figures, has_begun, times, wait_until

ON_DEMAND = (pytest.mark.slow, pytest.mark.on_demand)
Run = dict[str, Any]
TOGETHER: Run = {
    "placement": {"pools": {"all": 2}, "roles": {"actor": "all"}},
    "actor": TRAINED | {"parallel": {"pp": 2}},
}
APART: Run = {
    "placement": {"pools": {"train": 2, "engines": 2}, "roles": {"actor": "train", "rollout": "engines"}},
    "actor": TRAINED | {"parallel": {"pp": 2}},
}
ADAPTERS: Run = APART | {"actor": APART["actor"] | {"lora": {"rank": 4, "alpha": 8}}}
STAGES: Run = ADAPTERS | {"split": {"pp": 2}}

VICTIMS = (1, "$(cat /proc/{}/task/*/children)"), (1, "{}"), (0, "{}")
"""Rank of mrl's process of the engine, and what dies there: vLLM's worker, or this process itself."""


def _config(path: Path, model: Path, max_response_tokens: int = 8, **run: Any) -> Path:
    limits = {"max_prompt_tokens": 16, "max_response_tokens": max_response_tokens}
    vllm = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 26}
    split = run.pop("split", {"tp": 2})
    return write_run(path, model, rollout=split | {"vllm": vllm} | limits, **run)


def over(address: str, num_nodes: int = 2) -> str:
    return f"cluster={{nodes: {num_nodes}, devices_per_node: 1, ray_address: '{address}'}}"


@pytest.mark.parametrize(
    ("run", "num_nodes"),
    [
        pytest.param(TOGETHER, 2, id="on the actor's devices", marks=pytest.mark.slow),
        pytest.param(APART, 4, id="on four hosts of two pools", marks=ON_DEMAND),
        pytest.param(ADAPTERS, 4, id="with adapters only after the first version", marks=ON_DEMAND),
        pytest.param(STAGES, 4, id="with the adapters of each stage", marks=ON_DEMAND),
    ],
)
def test_a_run_with_an_engine_over_two_hosts_is_the_run_of_one(
    run: Run, num_nodes: int, model: Path, tmp_path: Path
) -> None:
    config, directory = _config(tmp_path / "two.yaml", model, **run), tmp_path / "runs" / "two"
    names = ["eth0", "ens7", "eth1", "ens8"][:num_nodes]
    with hosts(names) as some, ray_on(some, tmp_path, "--num-cpus=1") as address:
        some[0].mrl("train", str(config), over(address, num_nodes), "--quiet", cwd=tmp_path)
    started = [record.event for record in read_events(directory / "events.jsonl")]
    sizes = {event.role: event.world_size for event in started if isinstance(event, WorkersStarted)}
    assert sizes["rollout-0"] == 2, "one process on each host"
    metrics = untimed(directory)
    assert metrics == metrics_alone(config)
    assert all(step["actor/grad_norm"] > 1e-3 for step in metrics)
    if "lora" in run["actor"]:
        assert [step["sync/bytes_between_ranks"] > 0 for step in metrics] == [True] + [False] * (len(metrics) - 1)


@pytest.mark.slow
@pytest.mark.on_demand
@pytest.mark.parametrize(
    ("split", "victims", "alone"),
    [({"tp": 2}, VICTIMS, ()), ({"pp": 2}, VICTIMS[:1], ("rollout.pp=1", "rollout.replicas=1"))],
    ids=["tensor ranks", "stages"],
)
def test_an_engine_over_two_hosts_that_loses_a_process_is_replaced(
    split: Run, victims: tuple[tuple[int, str], ...], alone: tuple[str, ...], model: Path, tmp_path: Path
) -> None:
    """The figures are those of one host or, for stages, of one process."""
    steps = {"steps": len(victims) + 2}
    config = _config(tmp_path / "hurt.yaml", model, 48, split=split, **TOGETHER, training=steps)
    run = tmp_path / "runs" / "hurt"
    with hosts(["eth0", "ens7"]) as both, ray_on(both, tmp_path, "--num-cpus=1") as address, ThreadPoolExecutor(1) as t:
        trains = t.submit(both[0].mrl, "train", str(config), over(address), *RESTARTS, cwd=tmp_path)
        for number, (rank, victim) in enumerate(victims, 1):
            wait_for(run, trains, lambda n=number: has_begun(run, "rollout", step=n + 1))  # type: ignore[misc]
            both[rank].run("sh", "-c", f"kill -9 {victim.format(engine_of(run).pids[rank])}")
            wait_for(run, trains, lambda n=number: is_replaced(run, n))  # type: ignore[misc]
            assert [len(host.processes("VLLM::Worker")) for host in both] == [1, 1], "those of the lost engine ended"
        trains.result()
    assert not times(run, RunRestarted)
    events = [record.event for record in read_events(run / "events.jsonl")]
    reasons = [event.reason for event in events if isinstance(event, ReplicaLost)]
    for (rank, _), reason in zip(victims, reasons, strict=True):
        assert f"rollout-0 rank {rank} (tp{rank}) on node node{rank + 1}" in reason
    assert "VllmWorker-1 of the engine" in reasons[0]
    assert figures(untimed(run)) == [pytest.approx(step, rel=1e-4) for step in figures(metrics_alone(config, *alone))]


def is_replaced(run: Path, num_lost: int) -> bool:
    lost = times(run, ReplicaLost)
    return len(lost) == num_lost and times(run, ReplicaServes)[-1] > lost[-1]


def engine_of(run: Path) -> WorkersStarted:
    """Return the last start of the engine, with its processes on both hosts."""
    started = [record.event for record in read_events(run / "events.jsonl")]
    return [event for event in started if isinstance(event, WorkersStarted) and event.role == "rollout-0"][-1]


def wait_for(run: Path, trains: Future[str], condition: Callable[[], bool]) -> None:
    wait_until(lambda: trains.done() or ((run / "events.jsonl").exists() and condition()), 200)
    assert not trains.done(), trains.result()


@pytest.mark.slow
@pytest.mark.on_demand
def test_a_run_whose_engine_loses_its_second_host_waits_for_another(model: Path, tmp_path: Path) -> None:
    config = _config(tmp_path / "lost.yaml", model, 48, **TOGETHER, training={"steps": 3, "save_every": 1})
    run, limits = tmp_path / "runs" / "lost", ("deadlines.resources_s=120", *RESTARTS)
    with hosts(["eth0", "ens7"]) as both, ray_on(both, tmp_path, "--num-cpus=1") as address, ThreadPoolExecutor(1) as t:
        trains = t.submit(both[0].mrl, "train", str(config), over(address), *limits, cwd=tmp_path)
        wait_for(run, trains, lambda: has_begun(run, "rollout", step=2))
        both[1].kill_all()
        lost = time.time()
        wait_for(run, trains, lambda: bool(times(run, RunRestarted)))
        assert times(run, RunRestarted)[0] - lost < RESTARTS_S
        with ray_of(both[1], f"--address={both[0].address}:{RAY_PORT}", "--num-cpus=1") as again:
            again.await_start(120)
            output = trains.result()
    assert "node node2 (10.77.0.2)" in output or "on node node2" in output
    assert figures(untimed(run)) == [pytest.approx(step, rel=1e-4) for step in figures(metrics_alone(config))]
