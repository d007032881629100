"""An engine of a mixture whose data-parallel ranks are on two hosts: the run of one host, and the price of a death."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mrl.events import ReplicaLost, WorkersStarted, read_events
from tests.apart import run_python, untimed
from tests.hosts.conftest import write_run
from tests.hosts.hosts import Host, hosts, ray_on
from tests.hosts.shared_experts import ENGINE
from tests.hosts.test_engines import TOGETHER, VICTIMS, engine_of, is_replaced, over, wait_for
from tests.hosts.test_lost_host import figures, has_begun, wait_until
from tests.trainer.test_router_replay_run import make_mixture

pytestmark = [pytest.mark.slow, pytest.mark.on_demand]
PROGRAM = ("-m", "tests.hosts.shared_experts", "train")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mixture(tmp_path_factory.mktemp("mixture") / "model")


def _config(path: Path, mixture: Path, max_response_tokens: int, **run: Any) -> Path:
    vllm = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 26, "enable_expert_parallel": True}
    limits = {"max_prompt_tokens": 16, "max_response_tokens": max_response_tokens}
    rollout = {"dp": 2, "engine": ENGINE, "vllm": vllm} | limits
    return write_run(path, mixture, rollout=rollout, **TOGETHER | run)


def _train(host: Host, *arguments: str, cwd: Path) -> str:
    ran = host.run(sys.executable, *PROGRAM, *arguments, cwd=cwd)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


def _metrics_alone(config: Path, *overrides: str) -> list[dict[str, Any]]:
    run_python(*PROGRAM, str(config), "run.name=alone", *overrides, "--quiet")
    return untimed(config.parent / "runs" / "alone")


@pytest.mark.parametrize("replay", ["none", "R3"])
def test_a_run_with_data_parallel_ranks_on_two_hosts_is_the_run_of_one(
    replay: str, mixture: Path, tmp_path: Path
) -> None:
    """The weights arrive on both hosts, with their digests, and routes come from both."""
    algorithm = {"advantage": "grpo", "kl": {"where": "loss", "coef": 0.01}, "router_replay": replay}
    config, directory = _config(tmp_path / "two.yaml", mixture, 8, algorithm=algorithm), tmp_path / "runs" / "two"
    with hosts(["eth0", "ens7"]) as both, ray_on(both, tmp_path, "--num-cpus=1") as address:
        _train(both[0], str(config), over(address), "--quiet", cwd=tmp_path)
    started = [record.event for record in read_events(directory / "events.jsonl")]
    sizes = {event.role: event.world_size for event in started if isinstance(event, WorkersStarted)}
    assert sizes["rollout-0"] == 2, "one process on each host"
    metrics = untimed(directory)
    assert metrics == _metrics_alone(config)
    assert all(step["actor/grad_norm"] > 1e-3 for step in metrics)


def test_an_engine_whose_ranks_lose_a_process_is_replaced(mixture: Path, tmp_path: Path) -> None:
    config = _config(tmp_path / "hurt.yaml", mixture, 48, training={"steps": len(VICTIMS) + 2})
    run, words = tmp_path / "runs" / "hurt", ("deadlines.heartbeat_s=2", "--quiet")
    with hosts(["eth0", "ens7"]) as both, ray_on(both, tmp_path, "--num-cpus=1") as address, ThreadPoolExecutor(1) as t:
        trains = t.submit(_train, both[0], str(config), over(address), *words, cwd=tmp_path)
        for number, (rank, victim) in enumerate(VICTIMS, 1):
            wait_for(run, trains, lambda n=number: has_begun(run, "rollout", step=n + 1))  # type: ignore[misc]
            both[rank].run("sh", "-c", f"kill -9 {victim.format(engine_of(run).pids[rank])}")
            wait_for(run, trains, lambda n=number: is_replaced(run, n))  # type: ignore[misc]
            # Those of the lost engine have ended.
            wait_until(lambda: [len(host.processes("VLLM::Worker")) for host in both] == [1, 1], 10)
        trains.result()
    events = [record.event for record in read_events(run / "events.jsonl")]
    reasons = [event.reason for event in events if isinstance(event, ReplicaLost)]
    for (rank, _), reason in zip(VICTIMS, reasons, strict=True):
        assert reason.startswith(f"rollout-0 rank {rank} (tp{rank}) on node node{rank + 1}")
    assert "VllmWorker-0 of the engine" in reasons[0]
    assert figures(untimed(run)) == [pytest.approx(step, rel=1e-4) for step in figures(_metrics_alone(config))]
