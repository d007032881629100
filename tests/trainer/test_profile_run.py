"""Traces of real runs: a step with critic, agents, rewards and a replica that dies, and a step with batches ahead."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mrl.config.resolved.run_directory import steps_in
from mrl.demo.model import make_model
from tests.apart import run_mrl

CONFIG = """\
run: {{name: run, dir: {directory}/runs}}
cluster: {{devices_per_node: 2, device: cpu}}
placement: {{pools: {{all: 2}}, roles: {{actor: all, critic: all}}}}
model: {{path: {model}}}
algorithm: {{advantage: gae, kl: {{where: both, coef: 0.01}}}}
batch: {{prompts_per_step: 4, samples_per_prompt: 4, samples_per_update: 8}}
actor: {{dtype: float32, max_tokens_per_device: 128, optimizer: {{lr: 1e-3}}}}
critic: {{dtype: float32, max_tokens_per_device: 128, optimizer: {{lr: 1e-3}}}}
rollout: {{engine: transformers, replicas: 2, max_prompt_tokens: 16, max_response_tokens: 8}}
data: {{train: {{sums: {{dataset: "toy:addition", options: {{part: train}}}}}}}}
reward: {{functions: {{length: {{name: "tests.trainer.rewards:shortness"}}}}, num_workers: 1}}
agent: {{environments: {{world: {{name: "tests.agents.worlds:NewContext", max_turns: 2}}}}, num_workers: 1}}
training: {{steps: 3}}
"""
APART = (
    "placement={pools: {all: 1, engines: 1}, roles: {actor: all, critic: all, rollout: engines}}",
    "rollout.replicas=1",
    "asynchrony.ahead=1",
    "algorithm.correction={level: token}",
)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    model = make_model(tmp_path / "model", seed=1)
    (tmp_path / "run.yaml").write_text(CONFIG.format(directory=tmp_path, model=model))
    return tmp_path / "run.yaml"


def slices(trace: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield each slice of a trace with the names of its process and thread."""
    events = trace["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    yield from ((processes[e["pid"]], threads[e["tid"]], e) for e in events if e["ph"] == "X")


def assert_adds_up(trace: dict[str, Any], step: int) -> None:
    """In each process, the times in the spans of the working thread and the idle times add up to the step."""
    found = list(slices(trace))
    (whole,) = [e for _, _, e in found if e["name"] == f"step {step}"]
    begin, end = whole["ts"], whole["ts"] + whole["dur"]
    moments: dict[str, list[tuple[int, int]]] = defaultdict(list)
    idle: dict[str, int] = defaultdict(int)
    for process, thread, event in found:
        first, last = max(begin, event["ts"]), min(end, event["ts"] + event["dur"])
        if first >= last or process == "driver":
            continue
        if thread == "idle":
            idle[process] += last - first
        elif thread.startswith("engine_0" if "rollout" in process else ("MainThread", "samples")):
            moments[process].append((first, last))
    assert len(idle) >= 5
    for process, waited in idle.items():
        busy, reached = 0, begin
        for first, last in sorted(moments[process]):
            busy += max(0, last - max(first, reached))
            reached = max(reached, last)
        assert busy + waited == pytest.approx(end - begin, rel=0.02), process


@pytest.mark.slow
def test_the_trace_of_a_step_has_all_processes_and_adds_up(config: Path) -> None:
    """Critic, agents and rewards. A replica dies in the second step, and another process takes its place."""
    profile = "training.profile={steps: [2, 3], torch_ranks: [0]}"
    run_mrl("train", str(config), profile, "rollout.engine=tests.trainer.dying_engine:DyingEngine")
    run = config.parent / "runs" / "run"
    directory = run / "profile" / "step-000002"
    trace = json.loads((directory / "trace.json").read_text())
    names = {process for process, *_ in slices(trace)}
    expected = {"driver", *(f"{role} rank {rank}" for role in ("actor", "critic") for rank in (0, 1))}
    assert names >= expected | {"rollout-0 rank 0"}
    assert {name.split()[0] for name in names - expected} == {"rollout-0", "rollout-1", "agent", "reward"}
    died = [name for name in names if name.startswith("rollout-1") and "its process has ended" in name]
    assert len(died) == 1, names
    assert len([name for name in names if name.startswith("rollout-1")]) == 2, "its successor has its own row"
    for step in (2, 3):
        assert_adds_up(trace, step)
    moved = [e for process, _, e in slices(trace) if process == "actor rank 0" and e["cat"] == "transfer"]
    assert all(e["args"]["bytes_to_engine"] > 1e6 for e in moved)
    operations = json.loads((directory / "torch-critic-0.json").read_text())["traceEvents"]
    assert {"aten::mm", "forward_backward"} <= {event["name"] for event in operations}
    summary = (directory / "summary.txt").read_text()
    assert "step 2: " in summary
    assert "largest causes of idle devices" in summary
    assert "recording took at most" in summary


@pytest.mark.slow
@pytest.mark.on_demand
def test_further_steps_of_a_run_are_traced_beside_it(config: Path) -> None:
    run_mrl("train", str(config), "training.steps=1")
    run = config.parent / "runs" / "run"
    said = run_mrl("profile", str(run), "--steps", "1", "--quiet")
    assert f"{run}-profile/profile/step-000003/trace.json in https://ui.perfetto.dev" in said
    assert steps_in(run.with_name("run-profile") / "checkpoints") == []


@pytest.mark.slow
@pytest.mark.on_demand
def test_batches_ahead_are_traced(config: Path) -> None:
    """Engines with their own pool generate while the trainer computes: both are busy at the same time."""
    said = run_mrl("profile", str(config), "--steps", "2", "--quiet", *APART)
    directory = config.parent / "runs" / "run-profile" / "profile" / "step-000002"
    trace = json.loads((directory / "trace.json").read_text())
    for step in (2, 3):
        assert_adds_up(trace, step)
    generating = [e for process, thread, e in slices(trace) if "rollout" in process and e["name"] == "generate"]
    training = [
        e for process, _, e in slices(trace) if e["cat"].startswith(("compute_", "update_")) and "rank" in process
    ]
    overlaps = [
        min(a["ts"] + a["dur"], b["ts"] + b["dur"]) - max(a["ts"], b["ts"]) for a in generating for b in training
    ]
    assert max(overlaps) > 0
    assert "step 3: " in said
