"""Engines that differ from the trainer are detected and named individually."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrl.errors import AuditFailed
from mrl.events import EnginesCompared, EventLog, Warned, read_events
from mrl.protocol import DataProto
from mrl.protocol.columns import from_rows
from mrl.rollout.requests import Generated, GenerationRequest, Sampling
from mrl.trainer.engine_probe import EngineProbe
from tests.apart import run_mrl
from tests.models.tiny_models import tiny_config
from tests.trainer.fakes import make_config
from tests.trainer.peaked_model import make_peaked
from tests.trainer.test_ppo import CONFIG

TOKENS = [11, 12, 13, 14]
SCORED = np.array([-0.5, -1.0, -1.5, -2.0])
"""Log-probs of the actor."""


class Engines:
    """Each engine answers with the same tokens, and with log-probs that are off by its own constant."""

    def __init__(self, off: Mapping[int, Sequence[float]]) -> None:
        self.off = off
        self.asked: list[tuple[GenerationRequest, Sampling, bool]] = []

    def probe(self, request: GenerationRequest, sampling: Sampling, *, everyone: bool) -> dict[int, Generated]:
        self.asked.append((request, sampling, everyone))
        ids = np.array(TOKENS, dtype=np.int32)
        found = {index: (SCORED + np.array(off)).astype(np.float32) for index, off in self.off.items()}
        return {index: Generated("probe", ids, log_probs, "length", 1) for index, log_probs in found.items()}


class Actor:
    """Answers in reverse, as a role may."""

    def __init__(self, row_multiple: int) -> None:
        self.row_multiple = row_multiple
        self.batches: list[DataProto] = []

    def compute_log_prob(self, batch: DataProto) -> tuple[DataProto, dict[str, float]]:
        self.batches.append(batch)
        rows = from_rows([SCORED.tolist() for _ in range(len(batch))])
        return DataProto.from_dict({"old_log_probs": rows}, row_ids=batch.row_ids[::-1].copy()), {}


def words(text: Sequence[str], *, add_special_tokens: bool) -> dict[str, list[list[int]]]:
    assert not add_special_tokens
    return {"input_ids": [list(range(20, 20 + len(each.split()))) for each in text]}


class Stage:
    """A probe with fakes around it."""

    def __init__(
        self,
        directory: Path,
        off: Mapping[int, Sequence[float]],
        row_multiple: int = 1,
        sections: Mapping[str, Any] | None = None,
        **sync: Any,
    ) -> None:
        self.config = make_config(directory, sync=sync, **(sections or {}))
        self.engines, self.actor = Engines(off), Actor(row_multiple)
        self.events = EventLog(directory / "events.jsonl")
        arguments: Any = (self.config, self.engines, self.actor, words, self.events)
        self.probe = EngineProbe(*arguments)

    def run(self, step: int = 1) -> dict[str, float]:
        """The event's figures."""
        self.probe.compare(step, self.probe.ask(step))
        return self.figures()

    def warnings(self) -> list[Warned]:
        return [each.event for each in read_events(self.events.path) if isinstance(each.event, Warned)]

    def figures(self) -> dict[str, float]:
        found = [each.event for each in read_events(self.events.path) if isinstance(each.event, EnginesCompared)]
        return found[-1].mean_differences


@pytest.mark.parametrize("row_multiple", [1, 2, 4, 6])
def test_each_engine_has_its_mean_difference(tmp_path: Path, row_multiple: int) -> None:
    off = {0: [0.01, -0.01, 0, 0], 2: [0, 0, 0, 0], 5: [0, 0, 0, 0.06]}
    stage = Stage(tmp_path, off, row_multiple, probe_tolerance=0.1)
    assert stage.run() == pytest.approx({"0": 0.005, "2": 0.0, "5": 0.015}, abs=1e-6)
    (batch,) = stage.actor.batches
    assert len(batch) == -(-3 // row_multiple) * row_multiple, "every rank has rows"
    assert batch.lengths("prompts").tolist() == [8] * len(batch), "cut to rollout.max_prompt_tokens"
    assert batch.values("responses").tolist() == TOKENS * len(batch)


def test_the_worst_engine_is_named_with_the_others(tmp_path: Path) -> None:
    stage = Stage(tmp_path, {0: [0.01] * 4, 1: [0.5] * 4, 2: [0.03] * 4}, probe_tolerance=0.1)
    with pytest.raises(AuditFailed) as failed:
        stage.run(step=4)
    assert str(failed.value).startswith("step 4: engine 1 and the trainer disagree on log-probs: over 4 tokens")
    assert "is 0.5; sync.probe_tolerance=0.1 (engine 0 0.01, engine 2 0.03)" in str(failed.value)
    assert stage.figures() == pytest.approx({"0": 0.01, "1": 0.5, "2": 0.03}, abs=1e-6), "the event has them as well"


@pytest.mark.parametrize("engine", [0, 1])
def test_what_is_no_number_is_the_worst(tmp_path: Path, engine: int) -> None:
    with pytest.raises(AuditFailed, match=f"engine {engine} and the trainer disagree .* is nan"):
        Stage(tmp_path, {engine: [math.nan, 0, 0, 0], 1 - engine: [9.0] * 4}).run()


def test_the_tolerance_itself_is_allowed(tmp_path: Path) -> None:
    Stage(tmp_path, {0: [0.25] * 4}, probe_tolerance=0.25).run()
    with pytest.raises(AuditFailed):
        Stage(tmp_path, {0: [-0.2500001] * 4}, probe_tolerance=0.25).run()


def test_the_request_is_the_same_each_time_and_neither_cut_nor_stopped(tmp_path: Path) -> None:
    stage = Stage(tmp_path, {0: [0.0] * 4}, probe_every=3)
    for step in range(7):
        stage.probe.ask(step)
    requests = [request for request, _, _ in stage.engines.asked]
    assert all(request is requests[0] for request in requests)
    assert (len(requests[0].prompt_ids), requests[0].max_tokens) == (8, 4), "within the rollout's limits"
    assert {sampling for _, sampling, _ in stage.engines.asked} == {Sampling(stage.config.rollout.temperature)}
    assert [step for step, (_, _, everyone) in enumerate(stage.engines.asked) if everyone] == [0, 3, 6]


def test_nobody_is_asked_where_comparing_is_switched_off(tmp_path: Path) -> None:
    stage = Stage(tmp_path, {0: [0.0] * 4}, probe_every=0)
    assert stage.probe.ask(1) == {}
    assert stage.engines.asked == []


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes directories that say what a model is."""

    def make(family: str) -> Path:
        directory = tmp_path_factory.mktemp(family)
        tiny_config(family).save_pretrained(directory)
        return directory

    return make


FORMATS = [
    ("qwen3", "float32", None, 0.001),
    ("qwen3_moe", "float32", None, 0.001),
    ("qwen3", "bfloat16", None, 0.05),
    ("qwen3", "float32", "bfloat16", 0.05),
    ("qwen3_moe", "bfloat16", None, 0.1),
    ("qwen3_moe", "bfloat16", "float32", 0.1),
]


@pytest.mark.parametrize(("family", "trained", "served", "expected"), FORMATS)
def test_rounding_is_warned_of_and_counted_and_what_it_cannot_make_stops_the_run(
    tmp_path: Path, models: Callable[[str], Path], family: str, trained: str, served: str | None, expected: float
) -> None:
    sections: dict[str, Any] = {"model": {"path": str(models(family))}, "actor": {"dtype": trained}}
    sections["rollout"] = {"vllm": {"dtype": served} if served else {}, "temperature": 1.0}
    stage = Stage(tmp_path, {0: [0.0] * 4, 1: [0.9 * expected] * 4}, sections=sections)
    stage.run()
    assert stage.warnings() == []
    assert stage.probe.compare_step(1, {MEAN: 0.9 * expected}) == {"sync/engine_warnings": 0.0}
    stage.engines.off = {0: [0.0] * 4, 1: [1.1 * expected] * 4}
    stage.run(step=2)
    stage.run(step=2)
    assert stage.probe.compare_step(2, {MEAN: 9.9 * expected}) == {"sync/engine_warnings": 3.0}
    first, second, third = stage.warnings()
    assert [first.about, second.about, third.about] == ["engine 1", "engine 1", "engines"]
    assert f"at most {expected:g} is expected in {trained}" in first.message
    assert ("with experts" in first.message) == (expected == 0.1)
    assert "Warning 3 of this kind" in third.message
    assert stage.probe.compare_step(3, {MEAN: 0.0}) == {"sync/engine_warnings": 0.0}, "of each step alone"
    stage.engines.off = {0: [0.0] * 4, 1: [10.1 * expected] * 4}
    with pytest.raises(AuditFailed, match="engine 1 and the trainer disagree on log-probs"):
        stage.run(step=4)
    with pytest.raises(AuditFailed, match="the engines and the trainer disagree on the log-probs of the samples"):
        stage.probe.compare_step(4, {MEAN: 10.1 * expected})
    with pytest.raises(AuditFailed, match="is nan"):
        stage.probe.compare_step(4, {MEAN: math.nan})


def test_a_tolerance_of_the_user_stops_the_run_whatever_it_computes_in(
    tmp_path: Path, models: Callable[[str], Path]
) -> None:
    sections = {"model": {"path": str(models("qwen3"))}, "actor": {"dtype": "bfloat16"}}
    stage = Stage(tmp_path, {0: [0.03] * 4}, sections=sections, probe_tolerance=0.02)
    with pytest.raises(AuditFailed, match=r"is 0\.03; sync\.probe_tolerance=0\.02"):
        stage.run()
    assert stage.warnings() == []


@pytest.mark.parametrize(
    ("vllm", "said"),
    [
        ({}, "causes about 0.019; the engines' float32 heads avoid it"),
        ({"hf_overrides": {"head_dtype": "model"}}, "causes about 0.019 of it; the rounding in layers adds to this"),
    ],
)
def test_a_warning_says_what_rounding_explains(
    tmp_path: Path, models: Callable[[str], Path], vllm: dict[str, Any], said: str
) -> None:
    """The scored log-probs are -1.25 in the mean: between 1 and 2 nats, of which the table has 0.0154 and 0.0224."""
    sections: dict[str, Any] = {"model": {"path": str(models("qwen3"))}, "actor": {"dtype": "bfloat16"}}
    sections["rollout"] = {"temperature": 0.9, "vllm": vllm}
    stage = Stage(tmp_path, {0: [0.06] * 4}, sections=sections)
    stage.run()
    (warning,) = stage.warnings()
    assert f"At an entropy of 1.2 nats, rounding logits to bfloat16 {said}" in warning.message
    stage.probe.compare_step(1, {MEAN: 0.06, "actor/entropy_mean": 0.1})
    assert "At an entropy of 0.1 nats, rounding logits to bfloat16 causes about 0.0046" in stage.warnings()[-1].message
    stage.probe.compare_step(1, {MEAN: 0.06})
    assert "Without the policy's entropy" in stage.warnings()[-1].message


MEAN = "mismatch/log_prob_abs_diff_mean"


def refused(stage: Stage, metrics: dict[str, float], step: int = 1) -> bool:
    updates = [{"rollout_diff": metrics[name]} for name in ("first", "second") if name in metrics]
    try:
        stage.probe.compare_step(step, metrics, updates)
    except AuditFailed as error:
        return str(error).startswith(f"step {step}: ")
    return False


@pytest.mark.parametrize("name", [MEAN, "first"])
def test_all_samples_of_each_step_are_compared(tmp_path: Path, name: str) -> None:
    stage = Stage(tmp_path, {}, probe_every=3, probe_tolerance=0.05)
    assert [step for step in range(1, 5) if refused(stage, {name: 0.06}, step)] == [1, 2, 3, 4]
    assert not any(refused(stage, {name: 0.04}, step) for step in range(1, 8))
    assert not refused(Stage(tmp_path, {}, probe_every=0), {name: 0.06})
    assert refused(Stage(tmp_path, {}), {name: 0.06}), "and each step by default"
    assert not refused(Stage(tmp_path, {}), {})
    assert not refused(stage, {name: 0.06, "async/staleness/max": 1.0}), "the policy has moved since"
    assert refused(stage, {name: 0.06, "async/staleness/max": 0.0})


def test_old_log_probs_are_compared_before_those_of_the_updates(tmp_path: Path) -> None:
    stage = Stage(tmp_path, {})
    assert not refused(stage, {MEAN: 0.0, "first": 0.5})
    assert refused(stage, {MEAN: 0.5, "first": 0.0})


def test_only_the_first_update_is_compared(tmp_path: Path) -> None:
    """Later ones move the policy away from the engines."""
    stage = Stage(tmp_path, {})
    assert not refused(stage, {"first": 0.0, "second": 0.5, "actor/rollout_diff": 0.25})
    assert refused(stage, {"first": 0.5, "second": 0.5, "actor/rollout_diff": 0.5})


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 5}])
def test_a_distribution_that_was_cut_is_not_the_trained_one(tmp_path: Path, cut: dict[str, Any]) -> None:
    assert not refused(Stage(tmp_path, {}, sections={"rollout": cut}), {"first": 0.5})
    masked = {"rollout": cut, "algorithm": {"keep_sampling_mask": True}}
    assert refused(Stage(tmp_path, {}, sections=masked), {"first": 0.5})


@pytest.fixture(scope="module")
def peaked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step in bfloat16 whose model has logits as large as those of real models."""
    directory = tmp_path_factory.mktemp("peaked")
    config = directory / "run.yaml"
    config.write_text(CONFIG.format(directory=directory / "runs", model=make_peaked(directory / "model")))
    run_mrl("train", str(config), "run.name=healthy", *IN_BFLOAT16)
    return config


IN_BFLOAT16 = ("actor.dtype=bfloat16", "critic.dtype=bfloat16", "training.steps=1", "training.save_every=0")


def compared_in(directory: Path) -> tuple[float, list[Warned]]:
    """The mean difference of the first engine, and the warnings about engines."""
    events = [each.event for each in read_events(directory / "events.jsonl")]
    first = next(event for event in events if isinstance(event, EnginesCompared))
    warned = [event for event in events if isinstance(event, Warned) and event.about.startswith("engine")]
    return first.mean_differences["0"], warned


@pytest.mark.slow
def test_a_healthy_run_in_bfloat16_has_no_warnings(peaked: Path) -> None:
    difference, warned = compared_in(peaked.parent / "runs" / "healthy")
    assert 0 < difference < 0.05
    assert not warned


@pytest.mark.slow
@pytest.mark.on_demand
def test_rounded_logits_are_the_larger_difference_and_are_explained(peaked: Path) -> None:
    rounded = ["rollout.vllm.hf_overrides={head_dtype: model}", "sync.probe_tolerance=0.02"]
    printed = run_mrl("train", str(peaked), "run.name=rounded", *IN_BFLOAT16, *rounded, exit_code=1)
    assert "engine 0 and the trainer disagree on log-probs" in printed
    assert re.search(r"At an entropy of \S+ nats, rounding logits to bfloat16 causes about 0\.0\d+ of it", printed)
    healthy, too_far = (compared_in(peaked.parent / "runs" / name)[0] for name in ("healthy", "rounded"))
    assert healthy < 0.7 * too_far
    assert too_far > 0.02


@pytest.mark.slow
def test_one_of_two_engines_that_keeps_old_weights_stops_the_run(tmp_path: Path) -> None:
    """It received them, and its digests are right. The mean over all samples does not show it within its tolerance."""
    from mrl.demo.model import make_model

    config = tmp_path / "run.yaml"
    config.write_text(CONFIG.format(directory=tmp_path / "runs", model=make_model(tmp_path / "model", seed=1)))
    engine = "rollout.engine=tests.rollout.forgetful_engine:ForgetfulEngine"
    settings = ["rollout.replicas=2", "sync.probe_every=3", "training.save_every=0"]
    printed = run_mrl("train", str(config), "run.name=one", engine, *settings, exit_code=1)
    assert "step 3: engine 1 and the trainer disagree on log-probs" in printed
    events = [each.event for each in read_events(tmp_path / "runs" / "one" / "events.jsonl")]
    first, last = [event for event in events if isinstance(event, EnginesCompared)]
    assert (first.step, last.step) == (1, 3)
    assert max(first.mean_differences.values()) < 1e-5
    assert last.mean_differences["0"] < 1e-5 < 0.02 < last.mean_differences["1"]
