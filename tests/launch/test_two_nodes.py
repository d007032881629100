"""Whole jobs: the unchanged batch script, a Ray cluster of two nodes on one machine, and a run over both of them."""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from mrl.demo.demo import DemoSettings, demo_yaml
from mrl.demo.model import make_model
from mrl.errors import SetupError
from mrl.launch.dashboard import await_dashboard
from mrl.launch.node import free_port, head_options, ray_node
from tests.apart import untimed
from tests.launch.conftest import Place

SMALL = """\
extends: run.yaml
run: {{name: small}}
model: {{path: {model}}}
batch: {{prompts_per_step: 4, samples_per_prompt: 4, samples_per_update: 16}}
actor: {{dtype: float32, max_tokens_per_device: 128, optimizer: {{lr: 1e-3}}}}
critic: {{dtype: float32, max_tokens_per_device: 128, optimizer: {{lr: 1e-3}}}}
rollout: {{replicas: 1, max_prompt_tokens: 16, max_response_tokens: 8, vllm: {{kv_cache_memory_bytes: 67108864}}}}
sync: {{offload: false}}
reward: {{functions: {{answer: {{name: "own_rewards:shortness", options: {{last_number: false}}}}}}, num_workers: 1}}
training: {{steps: 400}}
"""
OWN = "def shortness(sample, last_number):\n    return 1.0 / (1 + sample.num_response_tokens)\n"


@pytest.fixture
def small(place: Place) -> Place:
    """Configure a run of a tiny model, with a custom reward."""
    model = make_model(place.directory / "model", seed=1)
    (place.directory / "small.yaml").write_text(SMALL.format(model=model))
    (place.directory / "own_rewards.py").write_text(OWN)
    return place


def rewrite(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


@pytest.mark.slow
@pytest.mark.on_demand
def test_a_run_over_two_nodes_is_stopped_queued_again_and_goes_on(small: Place) -> None:
    cluster = small.directory / "cluster.yaml"
    rewrite(cluster, "PYTHONPATH: ", f"PYTHONPATH: {small.directory}:")
    said = small.mrl("launch", "slurm", "small.yaml", "--submit")
    assert "job 1" in said
    files, run = small.directory / "runs" / "small.launch", small.directory / "runs" / "small"
    small.wait_for(run / "metrics.jsonl", 240)
    while not (run / "metrics.jsonl").read_text():
        assert not (small.job() / "gone").exists(), small.words()
        time.sleep(0.2)
    # The second attempt reads the same configuration; two more steps than the first has done are enough for it.
    (small.job() / "usr1").touch()
    small.wait_for(files / "attempt-1-0" / "exit_code", 120)
    done = len((run / "metrics.jsonl").read_text().splitlines())
    assert 1 <= done < 400
    rewrite(files / "config.yaml", '"steps": 400', f'"steps": {done + 2}')
    small.wait_for(small.job() / "gone", 300)
    assert (small.job() / "ended").read_text().split() == ["75", "0"], small.words()
    again = (files / "latest" / "train.log").read_text()
    assert "resumed from" in again
    assert len((run / "metrics.jsonl").read_text().splitlines()) == done + 2
    pools = re.findall(r'"kind": "pool_ready".*', (run / "events.jsonl").read_text())
    assert len(pools) == 2
    assert not (files / "attempt-1-0" / "token").exists()
    words = small.words()
    assert not [line for line in words.splitlines() if "Traceback" in line], words
    assert left_over(small.directory) == []
    alone = ["run.name=undisturbed", "cluster={nodes: 1, devices_per_node: 2, ray_address: null}"]
    small.mrl("train", "small.yaml", *alone, f"training.steps={done + 2}")
    assert untimed(run) == untimed(run.with_name("undisturbed")), "this one was never stopped, on one node"


@pytest.mark.slow
@pytest.mark.on_demand
def test_a_job_whose_node_never_comes_names_it_and_says_what_fits_without_it(small: Place) -> None:
    cluster = small.directory / "cluster.yaml"
    rewrite(cluster, "join_limit_s: 120", "join_limit_s: 40")
    (small.directory / "slurm" / "broken").write_text("node2")
    assert "job 1" in small.mrl("launch", "slurm", "small.yaml", "--submit")
    files = small.directory / "runs" / "small.launch"
    small.wait_for(small.job() / "gone", 240)
    assert (small.job() / "ended").read_text() == "1\n"
    said = (files / "latest" / "train.log").read_text()
    assert "1 of 2 nodes are not ready after 40 s: node2 has not joined" in said
    assert "cluster.nodes=1 has 1 CPU slot for placement.pools; the search supports only GPUs.\n" in said
    assert (files / "latest" / "node2.log").read_text() == "no such image\n"
    assert not (small.directory / "runs" / "small").exists(), "the run itself has not begun"
    assert left_over(small.directory) == []


@pytest.mark.slow
@pytest.mark.on_demand
def test_the_demo_as_a_job_of_a_ray_cluster_of_two_nodes(small: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration that `mrl demo` writes, for a few steps: a stage of the actor on each node.

    Without its SFT the model is never right, so another reward is asked for.
    """
    settings = DemoSettings(small.directory / "runs", tp=1, pp=2, steps=3)
    config = small.directory / "demo.yaml"
    reward = 'reward: {functions: {answer: {name: "own_rewards:shortness", options: {last_number: false}}}}\n'
    config.write_text(demo_yaml(settings, small.directory / "model", config) + reward)
    token = small.directory / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    small.environment.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token))
    for name, value in small.environment.items():
        monkeypatch.setenv(name, value)
    host = "127.0.0.1"
    port = free_port()
    options = head_options(port)
    address = f"http://{host}:{options[-1].partition('=')[2]}"
    with ray_node(host, "head", ["--num-cpus=1", *options]) as first:
        first.await_start(120)
        with ray_node(host, "second", ["--num-cpus=1", f"--address={host}:{port}"]) as second:
            second.await_start(120)
            await_dashboard(address, limit_s=120)
            over_both = ["cluster={nodes: 2, devices_per_node: 1, ray_address: auto}", "training.critic_warmup_steps=0"]
            small.mrl("launch", "ray", "demo.yaml", *over_both, "--address", address)
    run = small.directory / "runs" / "ppo"
    (pool,) = re.findall(r'"kind": "pool_ready".*', (run / "events.jsonl").read_text())
    assert '"devices": 2' in pool, "and each node has one"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [0, 1, 2, 3], "and step 0 is the validation before them"
    assert all(step["actor/grad_norm"] > 0 for step in steps[1:])
    assert [name for name in steps[-1] if name.startswith("val/")], "validated after the last step"
    assert left_over(small.directory) == []


@pytest.mark.slow
def test_a_job_of_a_ray_cluster_brings_its_configuration_and_code_along(
    small: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = small.directory / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    small.environment.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token))
    (small.directory / "secret.txt").write_text("not to be shipped")
    own = ["cluster={nodes: 1, devices_per_node: 2}", f"run.dir={small.directory}/runs"]
    for name, value in small.environment.items():
        monkeypatch.setenv(name, value)
    try:
        check_on_cluster(small, own)
    except SetupError as error:  # as at the start of a run, Ray may lose a process on a busy machine: once
        sys.stderr.write(f"{error}\n")
        check_on_cluster(small, own)
    assert left_over(small.directory) == []


def check_on_cluster(small: Place, own: list[str]) -> None:
    """Submit a check to a new cluster. Where Ray has ended, that is the error."""
    options = head_options(free_port())
    address = f"http://127.0.0.1:{options[-1].partition('=')[2]}"
    with another_agent(), ray_node("127.0.0.1", "head", ["--num-cpus=2", *options]) as node:
        node.await_start(120)
        await_dashboard(address, limit_s=120)
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("RAY_AUTH_TOKEN_PATH", os.devnull)
            with pytest.raises(SetupError, match="status 403"):
                await_dashboard(address)
        try:
            shipped = "shipped: config.yaml, own_rewards.py"
            assert shipped in small.mrl("launch", "ray", "small.yaml", *own, "--address", address, "--dry-run")
            said = small.mrl("launch", "ray", "small.yaml", *own, "--address", address, "--verb", "check")
        except AssertionError:
            node.check()
            raise
        assert re.search(r"ok +rewards of data.train.sums: the correct answers, written as .*, score 0\.\d", said), said
        assert "ok    Ray: 1 nodes with 2 CPU slots or more" in said


@contextmanager
def another_agent() -> Iterator[None]:
    """Hold the default port of the agent of every Ray, as another user's job would."""
    with socket.socket() as held:
        with suppress(OSError):
            held.bind(("", 52365))
            held.listen()
        yield


def left_over(directory: Path) -> list[str]:
    """Return processes of this test that still run after a while: a process that was asked to end may take a moment."""
    deadline = time.monotonic() + 20
    while (found := _running(directory)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return found


def _running(directory: Path) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
            words = (process / "environ").read_bytes() + command
        except OSError:
            continue
        if int(process.name) != os.getpid() and str(directory).encode() in words:
            found.append(command.decode().replace("\0", " "))
    return found
