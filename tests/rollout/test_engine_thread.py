"""The thread that runs an engine, and the replica around it: who waits for whom, and whose failure it is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import pytest

from mrl.config.mesh import Mesh
from mrl.controller import RankInfo, Rendezvous
from mrl.errors import RolloutError, WorkerSilent
from mrl.rollout.engine import RolloutEngine
from mrl.rollout.replica import EngineThread, RolloutReplica
from mrl.rollout.requests import Sampling
from tests.rollout.counting_engine import SETTINGS, CountingEngine, request

PLAIN = Sampling()
LONG_S = 20.0


class Driven:
    """A stepping thread and its engine."""

    def __init__(self, step_deadline_s: float = LONG_S) -> None:
        self.thread = EngineThread(partial(CountingEngine, SETTINGS), step_deadline_s)
        self.engine = cast(CountingEngine, self.thread._engine)
        self.thread.call(lambda engine: engine.receive_weights(1))
        self.engine.notes.clear()

    def start(self, *keys: str, max_tokens: int = 3) -> None:
        self.thread.call(lambda engine: engine.start([request(key, max_tokens) for key in keys], PLAIN))

    def collect(self, num: int) -> list[str]:
        found: list[str] = []
        until = time.monotonic() + LONG_S
        while len(found) < num and time.monotonic() < until:
            found += [sample.key for sample in self.thread.poll(0.2)]
        return found


@pytest.fixture
def make() -> Iterator[Callable[..., Driven]]:
    made: list[Driven] = []

    def driven(step_deadline_s: float = LONG_S) -> Driven:
        made.append(Driven(step_deadline_s))
        return made[-1]

    yield driven
    for each in made:
        each.engine.gate.set()


def test_steps_go_on_by_themselves_until_all_is_finished(make: Callable[..., Driven]) -> None:
    driven = make()
    driven.start("a", "b", max_tokens=2)
    driven.start("c", max_tokens=4)
    assert sorted(driven.collect(3)) == ["a", "b", "c"]
    assert driven.thread.poll(0) == []
    time.sleep(0.05)
    steps = driven.engine.notes.count("step")
    assert 4 <= steps <= 6
    time.sleep(0.05)
    assert driven.engine.notes.count("step") == steps  # nothing is under way
    driven.start("d")
    assert driven.collect(1) == ["d"]


def test_all_that_an_engine_does_it_does_in_one_thread(make: Callable[..., Driven]) -> None:
    driven = make()
    driven.start("a")
    driven.collect(1)
    assert len(driven.engine.threads) == 1
    assert threading.get_ident() not in driven.engine.threads


def test_what_is_asked_comes_after_the_step_under_way_and_its_answer_comes_back(make: Callable[..., Driven]) -> None:
    driven = make()
    driven.engine.gate.clear()
    driven.start("a", max_tokens=1)
    threading.Timer(0.2, driven.engine.gate.set).start()
    assert driven.thread.call(lambda engine: sorted(engine.unfinished)) == []
    assert driven.collect(1) == ["a"]


def test_finished_waits_for_something_and_no_longer(make: Callable[..., Driven]) -> None:
    driven = make()
    began = time.monotonic()
    assert driven.thread.poll(0.2) == []
    assert 0.15 < time.monotonic() - began < 5
    driven.start("a", max_tokens=1)
    began = time.monotonic()
    assert [sample.key for sample in driven.thread.poll(LONG_S)] == ["a"]
    assert time.monotonic() - began < LONG_S / 2


def test_a_step_that_does_not_end_is_noticed(make: Callable[..., Driven]) -> None:
    driven = make(0.3)
    driven.engine.gate.clear()
    driven.start("a")
    assert driven.thread.poll(0) == []
    with pytest.raises(WorkerSilent, match="the engine has been busy with one step for 0 s"):
        driven.thread.poll(0.4)
    driven.engine.gate.set()
    assert driven.collect(1) == ["a"]


def test_an_engine_that_idles_is_not_taken_for_busy(make: Callable[..., Driven]) -> None:
    driven = make(0.1)
    time.sleep(0.2)
    assert driven.thread.poll(0) == []
    driven.start("a")
    assert driven.collect(1) == ["a"]
    time.sleep(0.2)
    assert driven.thread.poll(0.1) == []


def test_the_time_of_a_step_begins_with_the_step(make: Callable[..., Driven]) -> None:
    driven = make(0.5)
    time.sleep(0.7)
    driven.engine.gate.clear()
    driven.start("a")
    assert driven.thread.poll(0) == []  # it has just begun, however long the engine had idled


def test_an_engine_that_sleeps_with_samples_under_way_does_no_step(make: Callable[..., Driven]) -> None:
    driven = make()
    driven.engine.gate.clear()
    driven.start("a")
    threading.Timer(0.1, driven.engine.gate.set).start()
    driven.thread.call(lambda engine: engine.sleep(keep=True))
    time.sleep(0.05)
    assert driven.engine.notes == ["start", "step", "sleep"]
    for part in ("weights", "kv_cache"):
        driven.thread.call(lambda engine, part=part: engine.wake(part))  # type: ignore[misc]
    driven.thread.call(lambda engine: engine.receive_weights(2, "recompute"))
    assert driven.collect(1) == ["a"]


def test_the_failure_of_a_step_is_raised_to_whoever_asks_next(make: Callable[..., Driven]) -> None:
    driven = make()
    driven.engine.fault = ValueError("the device is lost")
    driven.start("a")
    until = time.monotonic() + LONG_S
    while not driven.thread._stepping.done() and time.monotonic() < until:
        time.sleep(0.01)
    with pytest.raises(ValueError, match="the device is lost"):
        driven.thread.poll(0)
    with pytest.raises(ValueError, match="the device is lost"):
        driven.start("b")


def test_nothing_of_what_was_aborted_comes_back(make: Callable[..., Driven]) -> None:
    driven = make()
    driven.start("done", max_tokens=1)
    while driven.engine.left:
        time.sleep(0.01)
    driven.engine.gate.clear()
    driven.start("a", "b", max_tokens=30)
    threading.Timer(0.1, driven.engine.gate.set).start()
    driven.thread.abort()
    assert ("abort", ["a", "b"]) in driven.engine.notes
    assert driven.thread.poll(0.1) == []
    driven.start("a")
    assert driven.collect(1) == ["a"]


# --- the replica ----------------------------------------------------------------------------------------------------


def replica() -> tuple[Any, CountingEngine]:
    place = RankInfo("rollout-0", 0, 0, Mesh(1), Rendezvous("127.0.0.1", 0, 1, None))
    made: Any = RolloutReplica(place, "tests.rollout.counting_engine:CountingEngine", SETTINGS, LONG_S)
    return made, cast(CountingEngine, made._thread._engine)


def test_a_replica_starts_what_it_is_given_and_returns_what_is_finished() -> None:
    made, engine = replica()
    assert made.full_tensor_reason() == "it has no tensors"
    made.receive_weights(4)
    sampling = Sampling(temperature=0.5)
    found = [sample.key for sample in made.submit_and_poll([request("a", 1), request("b", 1)], sampling, 4, LONG_S)]
    while len(found) < 2:
        found += [sample.key for sample in made.submit_and_poll([], PLAIN, 4, 0.2)]
    assert sorted(found) == ["a", "b"]
    assert engine.sampling == sampling
    assert engine.notes.count("start") == 1


def test_a_broken_rule_is_returned_and_a_broken_engine_raises() -> None:
    made, engine = replica()
    made.receive_weights(1)
    answer = made.submit_and_poll([request("a")], PLAIN, 2, 0.0)
    assert isinstance(answer, RolloutError)
    assert "has weights 1, not version 2" in str(answer)
    assert not engine.unfinished
    answer = made.submit_and_poll([request("a", 99)], PLAIN, 1, 0.0)
    assert isinstance(answer, RolloutError)
    engine.fault = ValueError("the device is lost")

    def until_it_fails() -> None:
        made.submit_and_poll([request("a")], PLAIN, 1, 0.2)
        for _ in range(50):
            made.submit_and_poll([], PLAIN, 1, 0.2)

    with pytest.raises(ValueError, match="the device is lost"):
        until_it_fails()


def test_a_replica_passes_on_what_its_memory_is_to_do() -> None:
    made, engine = replica()
    made.receive_weights(1)
    made.sleep()
    made.wake("weights")
    made.wake("kv_cache")
    assert engine.notes[1:] == ["sleep", ("wake", "weights"), ("wake", "kv_cache")]
    made.receive_weights(2)
    made.submit_and_poll([request("a", 30)], PLAIN, 2, 0.0)
    made.abort()
    assert not cast(RolloutEngine, engine).unfinished
