"""The demo's configuration, its verdict, and its measurements before and after. `make demo` runs the training."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mrl.cli.demo import ALGORITHMS
from mrl.config.arithmetic import samples_per_step, updates_per_step
from mrl.config.resolved.load import load_config
from mrl.config.schema import ScheduleConfig
from mrl.config.sft import SftConfig
from mrl.demo import demo
from mrl.demo.demo import DemoResult, DemoSettings, demo_yaml, learn
from mrl.demo.model import make_model
from mrl.demo.tasks import SEARCH, SUMS
from mrl.trainer.run import Run
from tests.trainer.fakes import Screen


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("demo") / "model", seed=3)


def test_the_model_follows_from_its_seed_and_nothing_else_is_drawn(model: Path, tmp_path: Path) -> None:
    torch.manual_seed(11)
    expected = torch.rand(1)
    torch.manual_seed(11)
    weights = [load_file(make_model(tmp_path / str(seed), seed) / "model.safetensors") for seed in (3, 4)]
    assert torch.equal(torch.rand(1), expected)
    before = load_file(model / "model.safetensors")
    assert all(torch.equal(weights[0][name], tensor) for name, tensor in before.items())
    assert not torch.equal(weights[1]["lm_head.weight"], before["lm_head.weight"])
    assert 3e5 < sum(tensor.numel() for tensor in before.values()) < 5e5


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_has_a_configuration(algorithm: str, model: Path, tmp_path: Path) -> None:
    settings = DemoSettings(tmp_path, seed=7, algorithm=algorithm, tp=2, pp=1, steps=12)
    path = tmp_path / "demo.yaml"
    path.write_text(demo_yaml(settings, model, path))
    config = load_config(str(path)).config
    assert samples_per_step(config.batch) == 512
    assert updates_per_step(config.batch) == 4
    assert config.actor.schedule == ScheduleConfig(warmup_steps=20, decay="linear", decay_steps=48, min_lr_ratio=0.1)
    assert (config.actor.parallel.tp, config.actor.parallel.pp, config.cluster.devices_per_node) == (2, 1, 2)
    assert (config.training.steps, config.training.seed) == (12, 7)
    assert (config.validation.every, config.validation.samples_per_prompt) == (12, 4)
    assert (config.critic is not None) == (algorithm == "ppo")
    assert config.training.critic_warmup_steps == (2 if algorithm == "ppo" else 0)
    assert config.algorithm.advantage == {"ppo": "gae", "dapo": "grpo"}.get(algorithm, algorithm)
    assert (config.algorithm.dynamic_sampling is not None) == (algorithm == "dapo")
    assert config.algorithm.kl.where == {"grpo": "loss", "reinforce_plus_plus": "reward"}.get(algorithm, "none")
    train, held = config.data.train["sums"], config.data.validation["sums"]
    assert [train.options["part"], held.options["part"]] == ["train", "validation"]
    assert train.options["largest"] == held.options["largest"] == 49


@pytest.mark.parametrize(
    ("before", "after", "success"),
    [(0.40, 0.80, True), (0.41, 0.99, False), (0.0, 0.79, False), (0.1, None, False), (0.2, 0.9, True)],
)
def test_a_demo_succeeds_if_little_was_known_before_and_much_after(
    before: float, after: float | None, success: bool, tmp_path: Path
) -> None:
    figures = None if after is None else {SUMS.solved: after}
    result = DemoResult(before, figures, {}, tmp_path)
    assert (result.after, result.is_success) == (after, success)
    assert bool([*result.missed()]) == (not success and after is not None)


@pytest.mark.parametrize(
    ("two_hops", "missed"), [(0.75, []), (0.74, ["val/two_hops/solved/mean@1 is 74.0 %; at least 75 %"])]
)
def test_a_search_has_to_succeed_after_two_hops_as_well(two_hops: float, missed: list[str], tmp_path: Path) -> None:
    figures = {"val/solved/mean@1": 0.85, "val/two_hops/solved/mean@1": two_hops}
    result = DemoResult(0.4, figures, {}, tmp_path, SEARCH)
    assert [*result.missed()] == missed


class Trainer:
    """Runs the configured number of steps, and measures before and after."""

    num_steps = 12

    def __init__(self, run: Any) -> None:
        self.config, self.num_steps_done = run.config, 0

    @contextmanager
    def init_workers(self) -> Iterator[None]:
        yield

    def validate(self) -> dict[str, float]:
        assert self.num_steps_done == 0
        return {"val/solved/mean@4": 0.25, "val/score/mean@4": 0.75}

    def fit(self) -> dict[str, float]:
        self.num_steps_done = self.num_steps
        return {"val/solved/mean@4": 0.875, "val/score/mean@4": 0.9}


@pytest.mark.parametrize(("num_steps", "after"), [(12, 0.875), (5, None)])
def test_the_share_of_right_answers_is_measured_before_and_after(
    num_steps: int, after: float | None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "RayPPOTrainer", Trainer)
    monkeypatch.setattr(Trainer, "num_steps", num_steps)
    seconds: dict[str, float] = {}
    screen = Screen([])
    result = learn(DemoSettings(tmp_path, steps=12), model, screen, seconds)
    assert (result.before, result.after, result.config) == (0.25, after, tmp_path / "demo.yaml")
    assert list(seconds) == ["start of workers", "validation before", "ppo"]
    assert "25.0 %" in screen.said[-1]


def test_the_warm_up_imitates_a_careless_teacher(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[SftConfig] = []

    def train_sft(run: Run[SftConfig], on_update: Callable[[int, dict[str, float]], None]) -> Path:
        asked.append(run.config)
        for step in range(1, 81):
            on_update(step, {"loss": step / 10})
        return run.directory / "model"

    monkeypatch.setattr(demo, "train_sft", train_sft)
    monkeypatch.setattr(demo, "make_model", lambda path, seed, num_layers: shutil.copytree(model, path))
    screen, seconds = Screen([]), dict[str, float]()
    warm = demo.warm_model(DemoSettings(tmp_path, seed=4), screen, seconds)
    (config,) = asked
    assert warm == tmp_path / "sft" / "model"
    assert config.data.train["sums"].options == {"part": "train", "largest": 49, "mistakes": 0.64}
    assert (config.model.path, config.training.seed) == (str(tmp_path / "initial"), 4)
    assert config.training.steps == 340
    assert screen.said[-2:] == ["  update 40: loss 4.000", "  update 80: loss 8.000"]
    assert list(seconds) == ["model", "sft"]
