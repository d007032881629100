"""Engines that compute otherwise than the trainer are seen one by one, and named."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrl.errors import AuditFailed
from mrl.events import EnginesCompared, EventLog, read_events
from mrl.protocol import DataProto
from mrl.protocol.columns import from_rows
from mrl.rollout.requests import Generated, GenerationRequest, Sampling
from mrl.trainer.audit import EngineProbe
from tests.apart import run_mrl
from tests.trainer.fakes import make_config
from tests.trainer.test_ppo import CONFIG

TOKENS = [11, 12, 13, 14]
SCORED = np.array([-0.5, -1.0, -1.5, -2.0])
"""What the actor says of them."""


class Engines:
    """Each answers with the same tokens, and log-probs that are off by a number of its own."""

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
    """A probe among stand-ins."""

    def __init__(self, directory: Path, off: Mapping[int, Sequence[float]], row_multiple: int = 1, **sync: Any) -> None:
        self.config = make_config(directory, sync=sync)
        self.engines, self.actor = Engines(off), Actor(row_multiple)
        self.events = EventLog(directory / "events.jsonl")
        arguments: Any = (self.config, self.engines, self.actor, words, self.events)
        self.probe = EngineProbe(*arguments)

    def run(self, step: int = 1) -> dict[str, float]:
        """The event's figures."""
        self.probe.compare(step, self.probe.ask(step))
        return self.figures()

    def figures(self) -> dict[str, float]:
        found = [each.event for each in read_events(self.events.path) if isinstance(each.event, EnginesCompared)]
        return found[-1].mean_differences


@pytest.mark.parametrize("row_multiple", [1, 2, 4, 6])
def test_each_engine_has_its_mean_difference(tmp_path: Path, row_multiple: int) -> None:
    stage = Stage(tmp_path, {0: [0.01, -0.01, 0, 0], 2: [0, 0, 0, 0], 5: [0, 0, 0, 0.06]}, row_multiple)
    assert stage.run() == pytest.approx({"0": 0.005, "2": 0.0, "5": 0.015}, abs=1e-6)
    (batch,) = stage.actor.batches
    assert len(batch) == -(-3 // row_multiple) * row_multiple, "every rank has rows"
    assert batch.lengths("prompts").tolist() == [8] * len(batch), "cut to rollout.max_prompt_tokens"
    assert batch.values("responses").tolist() == TOKENS * len(batch)


def test_the_worst_engine_is_named_with_the_others(tmp_path: Path) -> None:
    stage = Stage(tmp_path, {0: [0.01] * 4, 1: [0.5] * 4, 2: [0.03] * 4}, probe_tolerance=0.1)
    with pytest.raises(AuditFailed) as failed:
        stage.run(step=4)
    assert str(failed.value).startswith("step 4: engine 1 does not compute what the trainer computes: over 4 tokens")
    assert "is 0.5; sync.probe_tolerance=0.1 (engine 0 0.01, engine 2 0.03)" in str(failed.value)
    assert stage.figures() == pytest.approx({"0": 0.01, "1": 0.5, "2": 0.03}, abs=1e-6), "the event has them as well"


@pytest.mark.parametrize("engine", [0, 1])
def test_what_is_no_number_is_the_worst(tmp_path: Path, engine: int) -> None:
    with pytest.raises(AuditFailed, match=f"engine {engine} does not compute .* is nan"):
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


@pytest.mark.slow
def test_one_of_two_engines_that_keeps_old_weights_stops_the_run(tmp_path: Path) -> None:
    """It received them, and its digests are right. The mean over all samples does not show it within its tolerance."""
    from mrl.demo.model import make_model

    config = tmp_path / "run.yaml"
    config.write_text(CONFIG.format(directory=tmp_path / "runs", model=make_model(tmp_path / "model", seed=1)))
    engine = "rollout.engine=tests.rollout.forgetful_engine:ForgetfulEngine"
    settings = ["rollout.replicas=2", "sync.probe_every=3", "training.save_every=0"]
    printed = run_mrl("train", str(config), "run.name=one", engine, *settings, exit_code=1)
    assert "step 3: engine 1 does not compute what the trainer computes" in printed
    events = [each.event for each in read_events(tmp_path / "runs" / "one" / "events.jsonl")]
    first, last = [event for event in events if isinstance(event, EnginesCompared)]
    assert (first.step, last.step) == (1, 3)
    assert max(first.mean_differences.values()) < 1e-5
    assert last.mean_differences["0"] < 1e-5 < 0.02 < last.mean_differences["1"]
