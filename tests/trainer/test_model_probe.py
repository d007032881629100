"""Models that are not compared with an engine: if one differs from its files, the run stops before the first update."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from mrl.demo.model import make_model
from mrl.events import ModelCompared, read_events
from tests.trainer.test_ppo import CONFIG as PPO
from tests.trainer.test_ppo import MAIN, ROOT
from tests.trainer.test_sft import COLUMNS, write_talks
from tests.trainer.test_sft import CONFIG as SFT

FEW = ("training.steps=2", "validation.every=0", "training.save_every=0")


def ran(directory: Path, verb: str, *overrides: str) -> tuple[int, str]:
    """The exit status of a run, and what it printed."""
    model = make_model(directory / "model", seed=1)
    config = directory / "run.yaml"
    if verb == "sft":
        write_talks(directory / "train.jsonl", 0, 20)
        write_talks(directory / "held.jsonl", 20, 4)
        config.write_text(SFT.format(directory=directory, model=model, columns=COLUMNS))
    else:
        config.write_text(PPO.format(directory=directory, model=model))
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", MAIN, verb, str(config), "run.name=run", *overrides],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT)},
        timeout=300,
    )
    return done.returncode, done.stdout + done.stderr


def compared(directory: Path) -> dict[str, ModelCompared]:
    """Recorded comparisons, by role."""
    events = [each.event for each in read_events(directory / "run" / "events.jsonl")]
    return {event.role: event for event in events if isinstance(event, ModelCompared)}


@pytest.mark.parametrize("worker", ["WrongNorm", pytest.param("WrongRope", marks=pytest.mark.slow)])
def test_sft_does_not_train_another_model_than_the_files_hold(worker: str, tmp_path: Path) -> None:
    status, said = ran(tmp_path, "sft", f"actor.worker=tests.trainer.wrong_models:{worker}", *FEW)
    assert status == 1, said
    assert f"actor and transformers disagree on {tmp_path}/model: on a fixed text of 48 tokens its log-probs" in said
    assert "fix: run mrl verify layout CONFIG, which compares the layout on a small model" in said
    event = compared(tmp_path)["actor"]
    assert event.difference > 10 * event.limit
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_a_critic_is_the_model_of_its_files(tmp_path: Path) -> None:
    engine = ("rollout.engine=transformers", "rollout.vllm={}")
    worker = "critic.worker=tests.trainer.wrong_models:WrongNormCritic"
    status, said = ran(tmp_path, "train", worker, *engine)
    assert status == 1, said
    assert f"critic and transformers disagree on {tmp_path}/model: on a fixed text of 48 tokens its hidden" in said
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert compared(tmp_path).keys() == {"critic"}, "engines are compared with the actor"


RIGHT = [
    ("{tp: 2, sequence_parallel: true}", "bfloat16"),
    *(
        pytest.param(layout, dtype, marks=pytest.mark.on_demand)
        for layout, dtype in [
            ("{tp: 2, sequence_parallel: true}", "float32"),
            *product(("{pp: 2}", "{cp: 2}"), ("bfloat16", "float32")),
        ]
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "dtype"), RIGHT)
def test_a_right_model_is_trained_in_every_layout(layout: str, dtype: str, tmp_path: Path) -> None:
    status, said = ran(tmp_path, "sft", f"actor={{parallel: {layout}, dtype: {dtype}}}", *FEW)
    assert status == 0, said
    event = compared(tmp_path)["actor"]
    assert 0 < event.difference < 0.5 * event.limit
    assert event.tokens == 48


@pytest.mark.slow
def test_the_comparison_can_be_switched_off(tmp_path: Path) -> None:
    off = "model.verify=false"
    status, said = ran(tmp_path, "sft", "actor.worker=tests.trainer.wrong_models:WrongNorm", off, *FEW)
    assert status == 0, said
    assert not compared(tmp_path)
