"""Whole runs: real Ray, real Megatron, a real vLLM engine, a model that is as small as it may be."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from mrl.cli.main import main
from mrl.config.resolved.run_directory import steps_in
from mrl.demo.model import make_model
from mrl.events import EventsLost, RunRestarted, Saved, read_events
from tests.apart import MAIN, ROOT, run_mrl, untimed
from tests.system_calls import SystemCall, watched_command

CONFIG = """\
run: {{name: small, dir: {directory}}}
cluster: {{devices_per_node: 2, device: cpu}}
placement: {{pools: {{all: 2}}, roles: {{actor: all, critic: all}}}}
model: {{path: {model}}}
algorithm: {{advantage: gae, kl: {{where: both, coef: 0.01}}}}
batch: {{prompts_per_step: 8, samples_per_prompt: 4, samples_per_update: 16}}
actor:
  parallel: {{tp: 2}}
  dtype: float32
  max_tokens_per_device: 128
  optimizer: {{lr: 1e-3}}
critic:
  dtype: float32
  max_tokens_per_device: 128
  optimizer: {{lr: 1e-3}}
rollout:
  replicas: 1
  max_prompt_tokens: 16
  max_response_tokens: 8
  vllm: {{enforce_eager: true, kv_cache_memory_bytes: 67108864}}
data:
  train: {{sums: {{dataset: "toy:addition", options: {{part: train}}}}}}
reward:
  functions: {{length: {{name: "tests.trainer.rewards:shortness"}}}}
  num_workers: 1
training: {{steps: 3, save_every: 1, keep: 3}}
"""


def train(config: Path, name: str, *overrides: str) -> tuple[list[dict[str, Any]], str]:
    """The metrics of a run without what only a clock decides, and what it printed."""
    printed = run_mrl("train", str(config), f"run.name={name}", *overrides)
    return untimed(config.parent / "runs" / name), printed


def hashes(checkpoint: Path) -> dict[str, Any]:
    """Return the hashes of a checkpoint's files in its manifests."""
    return {
        role: json.loads((checkpoint / role / "manifest.json").read_text())["files"] for role in ("actor", "critic")
    }


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ppo")
    model = make_model(directory / "model", seed=1)
    path = directory / "run.yaml"
    path.write_text(CONFIG.format(directory=directory / "runs", model=model))
    return path


EVERYTHING = (
    "algorithm={kl: {target: 1e-6, horizon_samples: 100}, correction: {upper: 1.0}}",
    'data.validation.held={dataset: "toy:addition", options: {part: validation, largest: 29}}',
    "validation={every: 1, samples_per_prompt: 4, k: [1, 2, 4], solved_at: 0.3, keep_best: true}",
    "validation.best_beyond_noise=false",
    "training={save_every: 0, keep: 9}",
    "data={sampler: difficulty, sampler_options: {between: [0.0, 1.0]}}",
    "data.train.sums.options.largest=13",  # 14 prompts, of which 24 are drawn
)
"""State that a resumed run could lose: the KL coefficient, the best score so far, the next validation, and the prompts
that rest because they were too easy or too hard.
"""


@pytest.fixture(scope="module")
def whole(config: Path) -> tuple[list[dict[str, Any]], str]:
    """Three steps, undisturbed."""
    return train(config, "small", *EVERYTHING)


def began(config: Path, name: str) -> Path:
    """The directory of a run that has done the first step of the whole one and no other, whose metrics it has."""
    run, again = config.parent / "runs" / "small", config.parent / "runs" / name
    shutil.copytree(run, again)
    for checkpoint in (again / "checkpoints").glob("step-*"):
        if checkpoint.name != "step-000001":
            shutil.rmtree(checkpoint)
    (again / "checkpoints" / "best").write_text("step-000001")
    return again


def state(run: Path) -> dict[str, Any]:
    """Return the last checkpoint's state without the models, and the best step."""
    kept: dict[str, Any] = json.loads((run / "checkpoints" / "step-000003" / "manifest.json").read_text())["state"]
    return {"trained": kept["trained"], "best": kept["best"], "is": (run / "checkpoints" / "best").read_text()}


@pytest.mark.slow
def test_a_run_and_the_same_run_resumed(config: Path, whole: tuple[list[dict[str, Any]], str]) -> None:
    """Three steps; then from the checkpoint of the first, in new processes, the other two: equal to the bit."""
    lines, printed = whole
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert "3/3" in printed
    first = lines[1]
    assert abs(first["reward/kl"]) < 1e-4, "before training the policy is its reference"
    assert first["mismatch/log_prob_abs_diff_max"] < 1e-5, "the engine samples from the trainer's weights"
    assert first["sync/bytes_between_ranks"] == first["sync/least_bytes"] > 0
    assert lines[-1]["critic/score/mean"] != first["critic/score/mean"]
    run = config.parent / "runs" / "small"
    saved = [record.event for record in read_events(run / "events.jsonl") if isinstance(record.event, Saved)]
    scores = {line["step"]: line["val/score/mean@4"] for line in lines}
    assert len({scores[step] for step in (1, 2, 3)}) == 3
    bests = [step for step in (1, 2) if scores[step] == max(scores[each] for each in range(1, step + 1))]
    assert [event.step for event in saved] == [*bests, 3]
    kl = state(run)["trained"]["kl"]
    assert kl["coef"] != 0.01, "the coefficient has moved"
    prompts = state(run)["trained"]["prompts"]["sampler"]
    assert prompts["again_in"]["sums"], "prompts that taught nothing rest"
    assert sum(prompts["drawn"].values()) > 24, "and were left out in the second epoch"
    assert state(run)["is"] == f"step-{max((1, 2, 3), key=scores.__getitem__):06d}"

    again = began(config, "again")
    resumed, printed = train(config, "again", *EVERYTHING)
    assert f"resumed from {again / 'checkpoints' / 'step-000001'}" in printed
    assert resumed == lines
    assert state(again) == state(run)
    last = Path("checkpoints", "step-000003")
    assert hashes(again / last) == hashes(run / last)
    for role, kind in (("actor", AutoModelForCausalLM), ("critic", AutoModelForSequenceClassification)):
        assert main(["export", str(run), str(run / role), f"--role={role}"]) == 0
        model = kind.from_pretrained(run / role)
        assert all(bool(tensor.isfinite().all()) for tensor in model.state_dict().values())
    initial = AutoModelForCausalLM.from_pretrained(config.parent / "model").state_dict()
    trained = AutoModelForCausalLM.from_pretrained(run / "actor").state_dict()
    moved = [name for name, tensor in trained.items() if not torch.equal(tensor, initial[name])]
    assert len(moved) == len(initial)


class FullDisk:
    """Takes nothing below a directory from the metrics of step 1 on, until those of step 2 are tried."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._num_metrics = 0
        self.refused: Counter[str] = Counter()

    def decide(self, call: SystemCall) -> int:
        if self._directory not in call.path.parents:
            return 0
        if call.path.name == "metrics.jsonl" and call.name == "openat":
            self._num_metrics += 1
        is_full = call.name in ("write", "openat", "mkdir", "pwrite64") and 1 < self._num_metrics < 3
        self.refused[call.path.relative_to(self._directory).parts[0]] += is_full
        return errno.ENOSPC if is_full else 0


@pytest.mark.slow
@pytest.mark.on_demand
def test_a_disk_that_is_full_for_a_while_costs_no_figure(config: Path, whole: tuple[list[dict[str, Any]], str]) -> None:
    """Every write of every process of the run fails: checkpoints, metrics, events, samples, logs."""
    run = config.parent / "runs" / "full"
    disk = FullDisk(run)
    often = ("training.save_every=1", "training.samples_every=1", "run.name=full")
    command = [sys.executable, "-c", MAIN, "train", str(config), *EVERYTHING, *often]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    options = {"env": environment | {"PYTHONPATH": str(ROOT)}, "stdout": PIPE, "stderr": STDOUT}
    with watched_command(command, disk.decide, **options) as process:
        printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0, printed
    assert untimed(run) == whole[0]
    assert {"checkpoints", "metrics.jsonl", "events.jsonl", "samples", "logs"} <= (+disk.refused).keys(), disk.refused
    for said in (
        "checkpoint: not saved, retrying",
        "cannot write metrics.jsonl",
        "samples: cannot write",
    ):
        assert said in printed
    events = [record.event for record in read_events(run / "events.jsonl")]
    assert sum(event.num for event in events if isinstance(event, EventsLost)) > 10
    assert steps_in(run / "checkpoints")[-1] == 3
    assert list((run / "checkpoints").glob(".*")) == []


@pytest.mark.slow
@pytest.mark.on_demand
def test_a_run_goes_on_in_another_layout(config: Path, whole: tuple[list[dict[str, Any]], str]) -> None:
    """From two tensor-parallel ranks to two stages: the same tokens, and what sums in another order make of them."""
    run, moved = config.parent / "runs" / "small", began(config, "moved")
    lines, _ = train(config, "moved", *EVERYTHING, "actor.parallel={tp: 1, pp: 2}")
    for one, other in zip(whole[0], lines, strict=True):
        assert one.keys() == other.keys()
        for figure in one:
            if figure.startswith(("val/", "critic/score/")):
                assert other[figure] == pytest.approx(one[figure], abs=1e-9), figure
    assert state(moved)["is"] == state(run)["is"]
    assert state(moved)["trained"]["kl"]["coef"] == pytest.approx(state(run)["trained"]["kl"]["coef"], rel=1e-3)
    assert state(moved)["trained"]["prompts"] == state(run)["trained"]["prompts"]


@pytest.mark.slow
@pytest.mark.on_demand
def test_a_checkpoint_measured_by_itself_has_the_figures_of_the_run(
    config: Path, whole: tuple[list[dict[str, Any]], str], tmp_path: Path
) -> None:
    """Engines that load the run's files give the same answers as engines with weights from the trainer."""
    run, file = config.parent / "runs" / "small", tmp_path / "eval.json"
    where = [f"--output={file}", "--temperatures=1,0"]
    printed = run_mrl("eval", str(run), "--checkpoint=1", *where)
    measured = json.loads(file.read_text())
    assert measured["checkpoint"] == "step-000001"
    sampled, greedy = (each["figures"] for each in measured["results"])
    assert sampled == {name: value for name, value in whole[0][1].items() if name.startswith("val/")}
    assert set(greedy) == {f"{of}{name}" for of in ("val/", "val/toy:addition/") for name in GREEDY}
    assert [line.split()[:2] for line in printed.splitlines()[1:-1]] == [
        [temperature, source] for temperature in ("1", "greedy") for source in ("toy:addition", "all")
    ]
    assert not list(run.parent.glob(".eval-*")), "nothing is left"
    model = tmp_path / "model"
    assert main(["export", str(run), str(model), "--checkpoint=3"]) == 0
    run_mrl("eval", str(model), f"--config={config}", *EVERYTHING[1:3], f"--output={file}")
    (last,) = json.loads(file.read_text())["results"]
    assert last["figures"] == {name: value for name, value in whole[0][3].items() if name.startswith("val/")}


GREEDY = ("prompts", "score/mean@1", "solved/mean@1")


@pytest.mark.slow
def test_a_run_that_loses_a_worker_starts_itself_again(config: Path, whole: tuple[list[dict[str, Any]], str]) -> None:
    """A rank of the actor is killed after the first step. The run ends with the metrics of an undisturbed one."""
    run = config.parent / "runs" / "disturbed"
    often = ("training.save_every=1", "training.max_restarts=1")
    with ThreadPoolExecutor(1) as threads:
        disturbed = threads.submit(train, config, "disturbed", *EVERYTHING, *often)
        wait_until((run / "checkpoints" / "step-000001").exists)
        os.kill(process_with(run / "logs", "actor"), signal.SIGKILL)
        lines, _ = disturbed.result()
    assert lines == whole[0]
    (restart,) = restarts(run)
    assert (restart.why, restart.number) == ("lost a worker or a node", 1)


def restarts(run: Path) -> list[RunRestarted]:
    return [each.event for each in read_events(run / "events.jsonl") if isinstance(each.event, RunRestarted)]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.1)


def process_with(logs: Path, role: str) -> int:
    """A worker of a role: the process that writes its log."""
    for log in Path("/proc").glob("[0-9]*/fd/[12]"):
        with suppress(OSError):
            if str(log.readlink()).startswith(f"{logs}/{role}"):
                return int(log.parts[2])
    raise AssertionError(f"no process writes a log of the {role}")
