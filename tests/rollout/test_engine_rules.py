"""Rules of every engine, on an engine without a model: versions, sleep, keys, and limits of requests."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from mrl.errors import NameUnknown, RolloutError
from mrl.rollout.engine import FreeMemory, engine_class, need_version
from mrl.rollout.requests import GenerationRequest, Sampling
from tests.rollout.counting_engine import SETTINGS, CountingEngine, request

PLAIN = Sampling()


@pytest.fixture
def engine() -> CountingEngine:
    made = CountingEngine(SETTINGS)  # forty tokens, a vocabulary of a hundred
    made.receive_weights(1)
    return made


def test_an_update_that_failed_leaves_no_version(engine: CountingEngine) -> None:
    with pytest.raises(RolloutError, match="torn"):
        engine.receive_weights(-1)
    assert engine.weight_version is None
    with pytest.raises(RolloutError, match="rollout-0 is stale: it has weights None, not version 1"):
        need_version(engine, 1)
    with pytest.raises(RolloutError, match="rollout-0 is stale: it has not received weights"):
        engine.start([request("a")], PLAIN)
    engine.receive_weights(3)
    need_version(engine, 3)
    assert engine.notes == [("weights", 1, None), ("weights", -1, None), ("weights", 3, None)]


def test_sleep_forgets_the_version_and_parts_wake_one_by_one(engine: CountingEngine) -> None:
    engine.sleep()
    assert engine.weight_version is None
    with pytest.raises(RolloutError, match="is asleep: wake its weights"):
        engine.receive_weights(1)
    with pytest.raises(RolloutError, match="cannot wake its kv_cache"):
        engine.wake("kv_cache")
    engine.wake("weights")
    with pytest.raises(RolloutError, match=r"cannot wake its weights: awake: \['weights'\]"):
        engine.wake("weights")
    engine.receive_weights(1)
    for act in (engine.sleep, lambda: engine.start([request("a")], PLAIN)):
        with pytest.raises(RolloutError, match="rollout-0 is asleep: wake its kv_cache first"):
            act()
    engine.wake("kv_cache")
    engine.start([request("a")], PLAIN)
    assert [note for note in engine.notes if note != "start"] == [
        *(("weights", 1, None), "sleep", ("wake", "weights"), ("weights", 1, None), ("wake", "kv_cache"))
    ]


def test_weights_change_and_engines_sleep_only_without_samples(engine: CountingEngine) -> None:
    engine.start([request("a")], PLAIN)
    with pytest.raises(RolloutError, match="new weights with 1 samples under way"):
        engine.receive_weights(2)
    with pytest.raises(RolloutError, match="asleep with 1 samples under way"):
        engine.sleep()
    assert engine.weight_version == 1


def test_a_part_without_room_stays_asleep_and_may_wake_later(engine: CountingEngine) -> None:
    engine.sleep()
    assert engine.wake("weights") == []
    engine.rooms = [FreeMemory(free_bytes=free, total_bytes=9, wanted_bytes=5) for free in (7, 3)]
    assert engine.wake("kv_cache") == engine.rooms
    assert [room.lacking_bytes for room in engine.rooms] == [-2, 2]
    engine.rooms = []
    assert engine.wake("kv_cache") == []


def test_two_samples_under_way_have_two_keys(engine: CountingEngine) -> None:
    with pytest.raises(RolloutError, match="two samples of rollout-0 have the same key"):
        engine.start([request("a"), request("a")], PLAIN)
    assert not engine.unfinished
    engine.start([request("a", 1), request("b", 2)], PLAIN)
    with pytest.raises(RolloutError, match="have the same key"):
        engine.start([request("a")], PLAIN)
    assert [sample.key for sample in engine.step()] == ["a"]
    assert set(engine.unfinished) == {"b"}
    engine.start([request("a", 5)], PLAIN)
    assert set(engine.unfinished) == {"a", "b"}


@pytest.mark.parametrize("max_tokens", [1, 37])
def test_a_prompt_and_its_response_fit_to_the_last_token(engine: CountingEngine, max_tokens: int) -> None:
    engine.start([request("a", max_tokens)], PLAIN)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (request("a", 38), "a: 3 prompt tokens and 38 new tokens exceed the limit of 40"),
        (request("a", 0), "0 new tokens exceed"),
        (dataclasses.replace(request("a"), prompt_ids=np.zeros(0, np.int32)), "0 prompt tokens"),
        (
            dataclasses.replace(request("a"), prompt_ids=np.array([3, 100], np.int32)),
            r"a prompt token is not in \[0, 1",
        ),
        (dataclasses.replace(request("a"), prompt_ids=np.array([3, -1], np.int32)), "a prompt token is not in"),
    ],
)
def test_a_request_that_would_be_cut_short_is_refused(
    engine: CountingEngine, wrong: GenerationRequest, message: str
) -> None:
    with pytest.raises(RolloutError, match=message):
        engine.start([request("b", 1), wrong], PLAIN)
    assert not engine.unfinished


def test_an_engine_is_found_by_name() -> None:
    with pytest.raises(NameUnknown, match='did you mean "vllm"'):
        engine_class("vlm")
    assert engine_class("mrl.rollout.transformers_engine:TransformersEngine").__name__ == "TransformersEngine"
