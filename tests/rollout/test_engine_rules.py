"""Rules that apply to every engine, tested on the fastest one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from mrl.errors import NameUnknown, RolloutError
from mrl.rollout.engine import FreeMemory, RolloutEngine, engine_class, need_version
from mrl.rollout.requests import GenerationRequest, Sampling
from tests.rollout.conftest import MAX_TOKENS, VOCAB, Small, requests, run
from tests.rollout.trainer_side import InBackground, send, update, whole

PLAIN = Sampling()


@pytest.fixture(scope="module")
def engine(make_engine: Callable[..., RolloutEngine], small: Small) -> RolloutEngine:
    made = make_engine("transformers", small("qwen3"))
    update(made, small("qwen3", 1), version=1)
    return made


def request(**changes: object) -> GenerationRequest:
    (plain,) = requests(1, 1)
    return dataclasses.replace(plain, **changes)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            request(max_tokens=MAX_TOKENS),
            f"18 prompt tokens and {MAX_TOKENS} new tokens exceed the limit of {MAX_TOKENS}",
        ),
        (request(max_tokens=0), "0 new tokens exceed"),
        (request(prompt_ids=np.zeros(0, np.int32)), "0 prompt tokens"),
        (request(prompt_ids=np.array([3, VOCAB], np.int32)), "p0/0: a prompt token is not in"),
        (request(prompt_ids=np.array([3, -1], np.int32)), "a prompt token is not in"),
    ],
)
def test_a_request_that_would_be_cut_short_is_refused(
    engine: RolloutEngine, wrong: GenerationRequest, message: str
) -> None:
    with pytest.raises(RolloutError, match=message):
        engine.start([wrong], PLAIN)
    assert not engine.unfinished


def test_a_sample_cannot_be_under_way_twice(engine: RolloutEngine) -> None:
    engine.start([request()], PLAIN)
    with pytest.raises(RolloutError, match="have the same key"):
        engine.start([request()], PLAIN)
    engine.abort()
    assert engine.step() == []


def test_weights_change_only_in_between(engine: RolloutEngine) -> None:
    engine.start([request()], PLAIN)
    with pytest.raises(RolloutError, match="new weights with 1 samples under way"):
        engine.receive_weights(2)
    with pytest.raises(RolloutError, match="asleep with 1 samples under way"):
        engine.sleep()
    engine.abort()
    assert engine.weight_version == 1


def test_an_engine_is_stale_until_an_update_has_succeeded(
    make_engine: Callable[..., RolloutEngine], small: Small
) -> None:
    engine = make_engine("transformers", small("qwen3"))
    with pytest.raises(RolloutError, match="stale: it has not received weights"):
        engine.start([request()], PLAIN)
    sending = InBackground(send, engine.settings, 1, list(whole(small("qwen3")))[:-1])
    with pytest.raises(RolloutError, match=r"missing keys.*lm_head\.weight"):
        engine.receive_weights(1)
    with pytest.raises(RolloutError, match=r"refused the weights: .*lm_head\.weight"):
        sending.result()
    with pytest.raises(RolloutError, match="stale"):
        engine.start([request()], PLAIN)
    sending = InBackground(send, engine.settings, 3, whole(small("qwen3")))
    with pytest.raises(RolloutError, match="sends version 3 instead of version 2"):
        engine.receive_weights(2)
    update(engine, small("qwen3"), version=2)
    with pytest.raises(RolloutError, match="has weights 2, not version 3"):
        need_version(engine, 3)
    assert len(run(engine, [request()], PLAIN)["p0/0"].token_ids) == 24


def test_sleeping_and_waking_have_an_order(make_engine: Callable[..., RolloutEngine], small: Small) -> None:
    engine = make_engine("transformers", small("qwen3"))
    with pytest.raises(RolloutError, match="cannot wake its weights"):
        engine.wake("weights")
    engine.sleep()
    with pytest.raises(RolloutError, match="is asleep: wake its kv_cache and weights first"):
        engine.sleep()
    with pytest.raises(RolloutError, match="is asleep: wake its weights"):
        engine.receive_weights(1)
    with pytest.raises(RolloutError, match="cannot wake its kv_cache"):
        engine.wake("kv_cache")
    engine.wake("weights")
    update(engine, small("qwen3"), version=1)
    with pytest.raises(RolloutError, match="is asleep: wake its kv_cache"):
        engine.start([request()], PLAIN)
    engine.wake("kv_cache")
    assert len(run(engine, [request()], PLAIN)) == 1


def test_a_part_without_room_sleeps_on(
    make_engine: Callable[..., RolloutEngine], small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine("transformers", small("qwen3"))
    engine.sleep()
    assert engine.wake("weights") == []
    rooms = [
        FreeMemory(free_bytes=7, total_bytes=9, wanted_bytes=5),
        FreeMemory(free_bytes=3, total_bytes=9, wanted_bytes=5),
    ]
    monkeypatch.setattr(engine, "_wake", lambda part: rooms)
    assert engine.wake("kv_cache") == rooms
    assert [room.lacking_bytes for room in rooms] == [-2, 2]
    monkeypatch.undo()
    assert engine.wake("kv_cache") == []  # it may be tried again


def test_an_engine_is_found_by_name() -> None:
    with pytest.raises(NameUnknown, match='did you mean "vllm"'):
        engine_class("vlm")
    assert engine_class("mrl.rollout.transformers_engine:TransformersEngine").__name__ == "TransformersEngine"
