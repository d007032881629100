"""Conversations over engines in real processes: identical bit for bit, for any number of engines and after any
death."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from mrl.agents.conversation import Conversation
from mrl.rollout.engine import RolloutEngine
from mrl.rollout.requests import Generated, GenerationRequest, Sampling, request_seed
from tests.rollout.conftest import Small, make_engine, run, small  # noqa: F401  # fixtures of tests here too
from tests.rollout.small_models import VOCAB
from tests.rollout.test_fleet import Fleet
from tests.rollout.trainer_side import update

pytestmark = pytest.mark.slow
ALONE = Sampling(stop_token_ids=(7, 8), alone=True)
NUM_CONVERSATIONS, NUM_TURNS, TURN_TOKENS = 6, 3, 12


class Talks:
    """Conversations of three turns. Each answer depends on the text before it."""

    def __init__(self) -> None:
        self.conversations = {}
        for number in range(NUM_CONVERSATIONS):
            prompt = np.random.default_rng(number).integers(10, VOCAB, 8).astype(np.int32)
            seed = request_seed(0, 1, f"p{number}", 0)
            self.conversations[str(number)] = Conversation(str(number), f"p{number}", prompt, max_tokens=80, seed=seed)
        self.ready: list[GenerationRequest] = []
        self.homes: dict[str, list[int | None]] = {key: [] for key in self.conversations}

    def first(self) -> list[GenerationRequest]:
        return [each.request(TURN_TOKENS) for each in self.conversations.values()]

    def take(self) -> list[GenerationRequest]:
        ready, self.ready = self.ready, []
        return ready

    def arriving(self) -> Future[Any] | None:
        return None

    def written(self, sample: Generated) -> None:
        key = sample.key.partition("/")[0]
        conversation = self.conversations[key]
        conversation.write(sample.token_ids, sample.log_probs, sample.finish)
        self.homes[key].append(sample.replica)
        if len(conversation.turns) == NUM_TURNS:
            conversation.end("turns")
            return
        answer = np.random.default_rng(sample.token_ids.tolist()).integers(10, VOCAB, 5).astype(np.int32)
        conversation.observe(answer)
        self.ready.append(replace(conversation.request(TURN_TOKENS), home=sample.replica))

    def said(self) -> dict[str, tuple[list[int], bytes, list[bool]]]:
        """Return ids, the bits of log-probs, and masks."""
        assert all(each.ended for each in self.conversations.values())
        return {
            key: (each.response_ids.tolist(), each.log_probs.tobytes(), each.mask.tolist())
            for key, each in self.conversations.items()
        }


@pytest.fixture(scope="module")
def by_one(make_engine: Callable[..., RolloutEngine], small: Small) -> Talks:  # noqa: F811
    """Return the replies of a single engine, asked for one turn after the other."""
    engine = make_engine("vllm", small("qwen3"))
    update(engine, small("qwen3", 1), version=1)
    talks = Talks()
    waiting = talks.first()
    while waiting:
        request = waiting.pop()
        (sample,) = run(engine, [request], ALONE).values()
        talks.written(sample)
        waiting += talks.take()
    return talks


@pytest.fixture(scope="module")
def fleet(run_context: Any, small: Small, by_one: Talks) -> Iterator[Fleet]:  # noqa: F811
    made = Fleet(run_context, partial(small, "qwen3"), 3, "vllm")
    yield made
    made.fleet.close()


def spoken(fleet: Fleet, act: Callable[[int], None] = lambda done: None) -> Talks:
    talks = Talks()
    for done, sample in enumerate(fleet.fleet.stream(talks.first(), ALONE, 1, talks), start=1):
        talks.written(sample)
        act(done)
    return talks


def test_three_replicas_say_what_one_does_to_the_bit(fleet: Fleet, by_one: Talks) -> None:
    talks = spoken(fleet)
    assert talks.said() == by_one.said()
    served = {home for homes in talks.homes.values() for home in homes}
    assert served == {0, 1, 2}


@pytest.mark.on_demand
def test_a_replica_that_is_killed_in_a_turn_changes_not_a_bit(fleet: Fleet, by_one: Talks) -> None:
    def kill(done: int) -> None:
        if done == 5:
            os.kill(fleet.pid(1), signal.SIGKILL)

    talks = spoken(fleet, kill)
    assert talks.said() == by_one.said()
    assert [lost.replica for lost in fleet.lost()] == [1]
