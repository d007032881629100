"""A trainer that computes while engines generate: which weights go where and when, and the versions of the samples."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mrl.errors import RolloutError, WorkerDied
from mrl.events import ReplicaLost
from mrl.rollout.requests import Generated, GenerationRequest, Sampling
from tests.rollout.stub_replicas import World, request

PLAIN = Sampling()


class Trainer:
    """Computes, or can send its newest weights."""

    def __init__(self) -> None:
        self.version = 1
        self.computes = False
        self.lock = threading.Lock()

    @contextmanager
    def newest(self) -> Iterator[int | None]:
        with self.lock:
            yield None if self.computes else self.version


class Open:
    """Requests that a test adds one by one; more may come until it is closed."""

    def __init__(self, *requests: GenerationRequest) -> None:
        self.ready = list(requests)
        self.later: Future[Any] | None = Future()

    def take(self) -> list[GenerationRequest]:
        ready, self.ready = self.ready, []
        return ready

    def arriving(self) -> Future[Any] | None:
        return self.later


@pytest.fixture
def trainer() -> Trainer:
    return Trainer()


@pytest.fixture
def world(tmp_path: Path, trainer: Trainer) -> Iterator[World]:
    made = World(tmp_path, 2, newest=trainer.newest)
    yield made
    made.fleet.close()
    made.log.close()


def received(world: World) -> list[tuple[int, tuple[Any, ...]]]:
    return world.calls("receive_weights")


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_replica_that_starts_while_the_trainer_computes_waits_for_it(world: World, trainer: Trainer) -> None:
    """The first replica dies at its first request. Its successor starts at once, but gets weights only when allowed."""
    world.fleet.update(1)
    trainer.computes = True
    world.fail_once(0, "submit_and_poll", WorkerDied("gone", role="rollout-0", ranks=[0]))
    follow_ups = Open(*(request(f"a{number}") for number in range(6)))
    found: list[Generated] = []
    stream = world.fleet.stream((), PLAIN, 1, follow_ups)
    while len(found) < 6:
        found.append(next(stream))
    assert {sample.replica for sample in found} == {1}
    until(lambda: world.num_started.count(0) == 2)
    assert received(world)[2:] == []
    with trainer.lock:
        trainer.version, trainer.computes = 2, False
    follow_ups.ready = [request(f"b{number}") for number in range(8)]
    follow_ups.later = None
    found += stream
    assert received(world)[2:] == [(0, (2,))], "the other holds what it had: nothing changes within a batch"
    assert {(sample.replica, sample.weight_version) for sample in found[6:]} == {(0, 2), (1, 1)}


def test_weights_go_to_all_as_soon_as_the_trainer_can_send(world: World, trainer: Trainer) -> None:
    world.fleet.update(1)
    trainer.computes = True
    follow_ups = Open(*(request(f"a{number}") for number in range(4)))
    stream = world.fleet.stream((), PLAIN, 1, follow_ups, "keep")
    first = [next(stream) for _ in range(2)]
    assert {sample.weight_version for sample in first} == {1}
    trainer.version, trainer.computes = 2, False
    follow_ups.ready = [request(f"b{number}") for number in range(8)]
    follow_ups.later = None
    rest = list(stream)
    assert sorted(received(world)[2:]) == [(0, (2, "keep")), (1, (2, "keep"))]
    assert [sample.weight_version for sample in rest][-1] == 2
    assert {sample.key for sample in (*first, *rest)} == {f"a{n}" for n in range(4)} | {f"b{n}" for n in range(8)}


@pytest.mark.parametrize(("in_flight", "num_late"), [(True, 1), (False, 1), (True, 2)])
def test_what_ended_before_the_weights_came_is_no_wrong_answer(
    world: World, trainer: Trainer, in_flight: bool, num_late: int
) -> None:
    """It had ended before they came, but no call had collected it. A replica that repeats such an answer is broken."""
    world.fleet.update(1)
    stream = world.fleet.stream([request(f"a{number}") for number in range(12)], PLAIN, 1, None, "recompute")
    found = [next(stream)]
    num_polls: Counter[int] = Counter()

    def spoil(index: int, made: list[Generated]) -> list[Generated]:
        if not made or made[0].weight_version == 1:
            return made
        num_polls[index] += 1
        return [replace(each, weight_version=1) for each in made] if num_polls[index] <= num_late and index else made

    world.spoil = spoil
    trainer.version = 2
    if not in_flight:
        world.fleet.sleep(keep=True)
        world.fleet.update(2, "recompute")
    found += stream
    assert sorted(sample.key for sample in found) == sorted(f"a{number}" for number in range(12))
    assert [lost.replica for lost in world.events(ReplicaLost)] == [1] * (num_late - 1)


def test_weights_wait_for_what_a_replica_is_asked(world: World) -> None:
    """Even if the calling thread is late. Otherwise the request's version would make the replica look stale."""
    world.fleet.update(1)
    stream = world.fleet.stream([request(f"a{number}") for number in range(6)], PLAIN, 1, None, "recompute")
    asks = threading.Event()

    def late() -> None:
        assert asks.wait(20)

    world.before[1, "submit_and_poll"] = [late]
    found = [next(stream)]
    threading.Timer(0.2, asks.set).start()
    world.fleet.sleep(keep=True)
    world.fleet.update(2, "recompute")
    found += stream
    assert sorted(sample.key for sample in found) == [f"a{number}" for number in range(6)]
    assert world.events(ReplicaLost) == []


def test_a_replica_that_dies_of_new_weights_loses_no_sample(world: World, trainer: Trainer) -> None:
    """The other replica, and then the successor, finish its requests."""
    world.fleet.update(1)
    trainer.computes = True
    follow_ups = Open(*(request(f"a{number}") for number in range(8)))
    stream = world.fleet.stream((), PLAIN, 1, follow_ups, "recompute")
    found = [next(stream)]
    world.fail_once(0, "receive_weights", WorkerDied("torn", role="rollout-0", ranks=[0]))
    trainer.version, trainer.computes = 2, False
    follow_ups.later = None
    found += stream
    assert sorted(sample.key for sample in found) == [f"a{number}" for number in range(8)]


def test_deaths_far_apart_do_not_stop_a_run_that_never_ends(world: World, trainer: Trainer) -> None:
    """Six deaths in total. The limit is three per request between two pushes."""
    world.fleet.update(1)
    follow_ups = Open()
    stream = world.fleet.stream((), PLAIN, 1, follow_ups, "recompute")
    for push in range(6):
        world.fail_once(push % 2, "submit_and_poll", WorkerDied("gone", role="rollout", ranks=[0]))
        follow_ups.ready = [request(f"{push}-{number}") for number in range(6)]
        assert len({next(stream).key for _ in range(6)}) == 6
        trainer.version += 1
    follow_ups.later = None
    assert list(stream) == []


def test_a_stream_of_another_thread_ends_when_it_is_told_to(world: World, trainer: Trainer) -> None:
    world.fleet.update(1)
    errors: list[Exception] = []

    def generate() -> None:
        try:
            list(world.fleet.stream((), PLAIN, 1, Open(), "recompute"))
        except RolloutError as error:
            errors.append(error)

    thread = threading.Thread(target=generate)
    thread.start()
    world.fleet.is_closing = True
    thread.join(10)
    assert not thread.is_alive()
    assert "the run ended" in str(errors[0])
