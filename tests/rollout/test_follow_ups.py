"""Follow-up requests: their replica, what they wait for, and what happens to them if a replica dies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mrl.errors import WorkerDied
from mrl.rollout.fleet import FOLLOW_UP_WAIT_S
from mrl.rollout.requests import Generated, GenerationRequest, Sampling
from mrl.rollout.scheduler import RequestScheduler
from tests.rollout.stub_replicas import World, request

PLAIN = Sampling()
Made = Callable[..., World]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Made]:
    made: list[World] = []

    def world(num_replicas: int = 2) -> World:
        made.append(World(tmp_path, num_replicas))
        return made[-1]

    yield world
    for each in made:
        each.fleet.close()
        each.log.close()


class Turns:
    """Conversations with a fixed number of turns; each answer arrives after a short delay from another thread."""

    def __init__(self, num_turns: int, delay_s: float = 0.01) -> None:
        self.num_turns, self.delay_s = num_turns, delay_s
        self.ready: list[GenerationRequest] = []
        self.num_pending = 0
        self.arrival: Future[Any] = Future()
        self.served: dict[str, int | None] = {}
        self.lock = threading.Lock()

    def take(self) -> list[GenerationRequest]:
        with self.lock:
            ready, self.ready = self.ready, []
            if self.arrival.done():
                self.arrival = Future()
        return ready

    def arriving(self) -> Future[Any] | None:
        with self.lock:
            return self.arrival if self.num_pending or self.arrival.done() else None

    def written(self, sample: Generated) -> None:
        self.served[sample.key] = sample.replica
        name, _, turn = sample.key.partition("/")
        if int(turn) + 1 == self.num_turns:
            return
        following = replace(request(f"{name}/{int(turn) + 1}", prompt=name), home=sample.replica)
        with self.lock:
            self.num_pending += 1
        threading.Timer(self.delay_s, self._answer, (following,)).start()

    def _answer(self, following: GenerationRequest) -> None:
        with self.lock:
            self.num_pending -= 1
            self.ready.append(following)
            if not self.arrival.done():
                self.arrival.set_result(None)


def run(world: World, turns: Turns, num: int, sampling: Sampling = PLAIN) -> None:
    first = [request(f"p{number}/0", prompt=f"p{number}") for number in range(num)]
    for sample in world.fleet.stream(first, sampling, 1, turns):
        turns.written(sample)


def wanted(num: int, num_turns: int) -> set[str]:
    return {f"p{number}/{turn}" for number in range(num) for turn in range(num_turns)}


def test_every_turn_is_written_though_nothing_is_generated_for_a_while(make: Made) -> None:
    world, turns = make(1), Turns(3, delay_s=0.15)
    run(world, turns, 1)
    assert turns.served.keys() == wanted(1, 3)
    assert {args[3] for _, args in world.calls("submit_and_poll")} == {FOLLOW_UP_WAIT_S}


def test_turns_go_where_their_cache_is_or_to_who_is_idle() -> None:
    work = RequestScheduler([], 2)
    work.add([replace(request(name), home=home) for name, home in (("a", 0), ("b", 1), ("c", None), ("d", 1))])
    assert [each.key for each in work.assign(1, 2)] == ["b", "d"]
    assert [each.key for each in work.assign(0, 2)] == ["a", "c"]
    work.add([replace(request("e"), home=1), replace(request("f"), home=1)])
    work.finish(0, [Generated(key, request("x").prompt_ids, None, "stop", 1) for key in ("a", "c")])  # type: ignore[arg-type]
    assert [each.key for each in work.assign(0, 2)] == ["e"], "an idle replica takes one of another's"


def test_what_waits_for_a_dead_replica_goes_to_the_others() -> None:
    work = RequestScheduler([], 2, max_in_flight=1)
    work.add([replace(request(name), home=1) for name in "abc"])
    assert [each.key for each in work.assign(1, 2)] == ["a"]
    assert work.requeue(1, "killed", has_served=True) == 1
    taken = []
    while more := work.assign(0, 1):
        taken += more
        work.finish(0, [Generated(each.key, each.prompt_ids, None, "stop", 1) for each in more])  # type: ignore[arg-type]
    assert [each.key for each in taken] == ["a", "b", "c"]
    assert {each.home for each in taken} == {None}
    assert work.num_left == 0


def test_a_replica_that_dies_costs_no_turn(make: Made) -> None:
    world, turns = make(2), Turns(4)
    world.fail_once(0, "submit_and_poll", WorkerDied("killed"))
    run(world, turns, 6)
    assert turns.served.keys() == wanted(6, 4)


def test_alone_no_replica_has_two_in_hand(make: Made) -> None:
    world, turns = make(2), Turns(2)
    run(world, turns, 5, replace(PLAIN, alone=True))
    assert turns.served.keys() == wanted(5, 2)
    assert max(len(args[0]) for _, args in world.calls("submit_and_poll")) == 1
