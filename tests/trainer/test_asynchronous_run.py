"""Whole runs with batches ahead: real Ray, real Megatron, and a real vLLM engine, in its own pool or not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from mrl.config.resolved.run_directory import steps_in
from mrl.demo.model import make_model
from mrl.events import ReplicaLost, read_events
from tests.apart import run_mrl, untimed
from tests.trainer.test_ppo import CONFIG

APART = (
    "placement={pools: {all: 2, engines: 1}, roles: {actor: all, critic: all, rollout: engines}}",
    "cluster.devices_per_node=3",
)
WEIGHED = ("algorithm.correction={level: token}", "algorithm.kl={where: both, target: 1e-6, horizon_samples: 100}")
MEASURED = (
    'data.validation.held={dataset: "toy:addition", options: {part: validation, largest: 19}}',
    "validation={every: 2, samples_per_prompt: 2, solved_at: 0.3}",
)
LONG = (
    "rollout.max_response_tokens=40",
    "rollout.vllm.max_num_seqs=2",  # of 32 samples: generating is several times as long as training on any machine
    "actor.max_tokens_per_device=256",
    "critic.max_tokens_per_device=256",
)

ADAPTERS = ("actor.lora={rank: 4, alpha: 8}", "actor.optimizer.lr=1e-2")
IN_FLIGHT = (*WEIGHED, *MEASURED, *LONG, "asynchrony.weights=in_flight", "sync.probe_every=2")


def train(config: Path, name: str, *overrides: str) -> list[dict[str, Any]]:
    """The metrics of a run without what only a clock decides."""
    run_mrl("train", str(config), f"run.name={name}", *overrides)
    return untimed(config.parent / "runs" / name)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("asynchronous")
    model = make_model(directory / "model", seed=1)
    path = directory / "run.yaml"
    # A replay sends weights before its engine has done the steps that come first, for which it may take long.
    path.write_text(CONFIG.format(directory=directory / "runs", model=model) + "deadlines: {call_s: 300}\n")
    return path


@pytest.mark.slow
@pytest.mark.on_demand
@pytest.mark.parametrize("source", ["engine", "interpolated"])
def test_a_trainer_without_old_log_probs_of_its_own_learns_from_old_samples(config: Path, source: str) -> None:
    corrects = WEIGHED[:1] if source == "interpolated" else ()
    settings = (*APART, *corrects, "asynchrony.ahead=1", "algorithm.kl.where=loss", f"algorithm.old_log_probs={source}")
    lines = train(config, source, *settings)
    assert [line["async/staleness/max"] for line in lines] == [0, 1, 1]
    assert not any(name.startswith("mismatch/") for line in lines for name in line)
    assert all(abs(line["actor/ppo_kl"]) > 1e-9 for line in lines[1:]), "the ratio is to older weights"


@pytest.mark.slow
@pytest.mark.on_demand
def test_a_run_with_a_batch_ahead_and_the_same_run_resumed(config: Path) -> None:
    """To the bit: three steps with one batch ahead, validated and saved."""
    settings = (*APART, *WEIGHED, *MEASURED, "asynchrony.ahead=1")
    lines = train(config, "threaded", *settings)
    assert [line["async/staleness/max"] for line in lines[1:]] == [0, 1, 1]
    assert lines[2]["mismatch/ratio_mean/age_1"] != 1.0
    assert 0 < lines[2]["mismatch/ratio_eff_sample_size/age_1"] < 1
    assert abs(lines[1]["mismatch/ratio_mean/age_0"] - 1) < 1e-5

    run, again = config.parent / "runs" / "threaded", config.parent / "runs" / "again"
    shutil.copytree(run, again)
    for step in steps_in(run / "checkpoints"):
        if step > 1:
            shutil.rmtree(again / "checkpoints" / f"step-{step:06d}")
    assert (again / "checkpoints" / "step-000001" / "drawn-ahead.bin").stat().st_size > 0
    assert train(config, "again", *settings) == lines


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("in-flight", (*APART, "asynchrony.ahead=2")),
        pytest.param("carried", ("asynchrony.ahead=1",), marks=pytest.mark.on_demand),
        pytest.param("adapters", (*APART, *ADAPTERS, "asynchrony.ahead=2"), marks=pytest.mark.on_demand),
    ],
)
def test_weights_in_flight(name: str, overrides: tuple[str, ...], config: Path) -> None:
    """No token is older than it may be, no engine is lost, and a replay is equal to the bit."""
    settings = (*overrides, *IN_FLIGHT)
    lines = train(config, name, *settings, "training={steps: 4, save_every: 2}")
    ahead = int(overrides[-1][-1])
    ages = [line["async/staleness/max"] for line in lines[1:]]
    assert ages[0] == 0
    assert max(ages) <= ahead
    assert any(ages), "nothing was ahead"
    assert max(line["async/versions_per_sample"] for line in lines[1:]) > 1, "nothing came in flight"
    if name == "adapters":
        assert [line["sync/bytes_between_ranks"] for line in lines[2:]] == [0] * (len(lines) - 2)
    run = config.parent / "runs" / name
    lost = [found.event for found in read_events(run / "events.jsonl") if isinstance(found.event, ReplicaLost)]
    assert not lost
    said = run_mrl("train", "--replay", str(run))
    assert f"identical to {run}, bit for bit, up to its last step, 4" in said
    assert untimed(run.with_name(f"{name}-replay")) == lines


@pytest.mark.slow
@pytest.mark.on_demand
def test_a_run_with_weights_in_flight_goes_on_after_its_end(config: Path) -> None:
    name, settings = "longer", (*APART, "asynchrony.ahead=2", *IN_FLIGHT)
    train(config, name, *settings, "training={steps: 3, save_every: 2}")
    lines = train(config, name, *settings, "training={steps: 5, save_every: 2}")
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5]
    assert all("async/staleness/mean" in line for line in lines[1:])
    assert [line["step"] for line in lines if "val/score/mean@2" in line] == [0, 2, 3, 4, 5]
