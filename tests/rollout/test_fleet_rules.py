"""Calls of a fleet to its replicas, and its reactions to failures: a real fleet on replicas without processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mrl.errors import RolloutError, WorkerDied, WorkerRaised, WorkerSilent
from mrl.events import ReplicaLost, ReplicaServes
from mrl.rollout.replica_calls import WAIT_S
from mrl.rollout.requests import Generated, GenerationRequest, Sampling
from tests.rollout.stub_replicas import LIMITS, World, generate, request

PLAIN = Sampling()
WANTED = [request(f"p{number // 2}/{number % 2}", prompt=f"p{number // 2}") for number in range(8)]
KEYS = [each.key for each in WANTED]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def world(num_replicas: int = 2) -> World:
        made.append(World(tmp_path, num_replicas))
        return made[-1]

    yield world
    for each in made:
        for gate in each.may_start.values():
            gate.set()
        each.fleet.close()
        each.log.close()


def keys_of(world: World, version: int = 1) -> list[str]:
    samples = generate(world.fleet, WANTED, PLAIN, version)
    assert {sample.weight_version for sample in samples} == {version}
    return [sample.key for sample in samples]


def test_samples_come_in_the_order_of_their_requests_from_all_replicas(make: Callable[..., World]) -> None:
    world = make()
    assert keys_of(world) == KEYS
    asked = world.calls("submit_and_poll")
    assert {index for index, _ in asked} == {0, 1}
    assert all(args[1:] == (PLAIN, 1, WAIT_S) for _, args in asked)
    given = [each.key for _, args in asked for each in args[0]]
    assert sorted(given) == sorted(KEYS)
    assert generate(world.fleet, [], PLAIN, 1) == []


def test_only_what_is_stale_is_brought_up_to_date(make: Callable[..., World]) -> None:
    world = make()
    keys_of(world, 1)
    keys_of(world, 1)
    assert world.sent == [((0, 1), 1)]
    world.fleet.update(2)
    keys_of(world, 2)
    assert world.sent == [((0, 1), 1), ((0, 1), 2)]
    world.fleet.update(2)  # who asks for an update gets it
    assert world.sent[2:] == [((0, 1), 2)]
    keys_of(world, 3)
    assert world.sent[3:] == [((0, 1), 3)]
    assert [args for _, args in world.calls("receive_weights")] == [(1,), (1,), (2,), (2,), (2,), (2,), (3,), (3,)]
    served = [(event.replica, event.weight_version) for event in world.events(ReplicaServes)]
    assert served == [(0, 1), (1, 1), (0, 2), (1, 2), (0, 2), (1, 2), (0, 3), (1, 3)]


def test_engines_that_slept_hold_nothing(make: Callable[..., World]) -> None:
    world = make()
    keys_of(world)
    world.fleet.sleep()
    world.fleet.wake("weights")
    world.fleet.wake("kv_cache")
    keys_of(world)
    assert world.sent == [((0, 1), 1), ((0, 1), 1)]
    assert world.calls("wake") == [(0, ("weights",)), (1, ("weights",)), (0, ("kv_cache",)), (1, ("kv_cache",))]
    assert world.calls("sleep") == [(0, ()), (1, ())]


def test_a_successor_that_starts_after_the_end_of_a_stream_is_not_taken_for_the_dead_one(
    make: Callable[..., World],
) -> None:
    world = make()
    world.fleet.update(1)
    world.may_start[1] = threading.Event()
    world.fail_once(1, "submit_and_poll", WorkerDied("the process of rank 0 was killed\nmore of it"))
    assert keys_of(world) == KEYS  # by the other alone
    assert world.sent == [((0, 1), 1)]
    world.may_start[1].set()
    assert keys_of(world) == KEYS
    assert world.sent == [((0, 1), 1), ((1,), 1)]
    (lost,) = world.events(ReplicaLost)
    assert (lost.replica, lost.reason, lost.num_unfinished) == (1, "the process of rank 0 was killed", 4)
    assert world.num_started == [0, 1, 1] or world.num_started == [1, 0, 1]
    assert world.calls("shutdown") == [(1, ())]


def test_a_successor_joins_the_stream_that_is_under_way(make: Callable[..., World]) -> None:
    world = make()
    world.fleet.update(1)
    for index in (0, 1):
        world.fail_once(index, "submit_and_poll", WorkerSilent("it is stopped"))
    assert keys_of(world) == KEYS  # no replica was left
    assert sorted(index for indices, _ in world.sent[1:] for index in indices) == [0, 1]
    assert {version for _, version in world.sent} == {1}
    assert [event.reason for event in world.events(ReplicaLost)] == ["it is stopped"] * 2
    assert sorted(index for index, _ in world.calls("shutdown")) == [0, 1]


def test_whoever_dies_while_it_receives_is_let_go_and_the_rest_tries_again(make: Callable[..., World]) -> None:
    world = make(3)
    world.send_error = RolloutError("weights 1 did not arrive")
    world.fail_once(0, "receive_weights", WorkerDied("killed"))
    world.fail_once(2, "receive_weights", WorkerRaised("the trainer is gone"))
    world.fleet.update(1)
    assert world.sent == [((0, 1, 2), 1), ((2,), 1)]
    assert [(event.replica, event.reason, event.num_unfinished) for event in world.events(ReplicaLost)] == [
        (0, "killed", 0)
    ]
    assert keys_of(world) == KEYS
    successors = [indices for indices, _ in world.sent[2:]]
    assert successors in ([], [(0,)])  # whether it was there in time


@pytest.mark.parametrize("who", ["the trainer", "a replica"])
def test_a_transfer_that_fails_with_everybody_alive_stops_the_run(make: Callable[..., World], who: str) -> None:
    world = make()
    if who == "the trainer":
        world.send_error = RolloutError("replica 1 refused the weights")
    else:
        world.fail_once(1, "receive_weights", WorkerRaised("replica 1 refused the weights"))
    with pytest.raises((RolloutError, WorkerRaised), match="replica 1 refused the weights"):
        world.fleet.update(1)
    assert world.events(ReplicaLost) == []
    assert len(world.sent) == 1


def test_replicas_that_were_left_without_a_version_get_it_before_they_serve(make: Callable[..., World]) -> None:
    world = make()
    world.fleet.update(1)
    world.fail_once(1, "receive_weights", WorkerRaised("refused"))
    with pytest.raises(WorkerRaised, match="refused"):
        world.fleet.update(1)
    assert keys_of(world) == KEYS
    assert world.sent == [((0, 1), 1), ((0, 1), 1), ((1,), 1)]


def test_a_rule_that_was_broken_stops_the_run_and_the_others_forget(make: Callable[..., World]) -> None:
    world = make()
    world.fleet.update(1)
    world.fleet._replicas[1].held = 7  # type: ignore[attr-defined]  # it lies about what it holds
    with pytest.raises(RolloutError, match="replica 1 is stale: it has weights 7, not version 1"):
        generate(world.fleet, WANTED, PLAIN, 1)
    assert world.calls("abort") == [(0, ()), (1, ())]
    assert world.events(ReplicaLost) == []


def test_whoever_stops_asking_makes_those_forget_who_have_something(make: Callable[..., World]) -> None:
    world = make()
    stream = world.fleet.stream(WANTED[:1], PLAIN, 1)
    assert next(stream).key == KEYS[0]
    stream.close()  # type: ignore[attr-defined]
    assert world.calls("abort") == []
    stream = world.fleet.stream(WANTED, PLAIN, 1)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert {index for index, _ in world.calls("abort")} == {0, 1}
    assert keys_of(world) == KEYS


def test_who_fails_to_wake_is_let_go_and_replaced(make: Callable[..., World]) -> None:
    world = make()
    world.fleet.update(1)
    world.fail_once(0, "wake", WorkerRaised("out of memory\nTraceback"))
    world.fleet.wake("kv_cache")
    (lost,) = world.events(ReplicaLost)
    assert (lost.replica, lost.reason, lost.num_unfinished) == (0, "out of memory", 0)
    assert world.calls("wake") == [(0, ("kv_cache",)), (1, ("kv_cache",))]
    assert keys_of(world) == KEYS
    world.fleet.update(2)
    assert world.sent[-1] == ((0, 1), 2) or world.sent[-1] == ((1, 0), 2)
    assert sorted(world.num_started) == [0, 0, 1]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([WANTED[0], WANTED[0]], "two requests have the same key"),
        ([WANTED[0], request("x", max_tokens=38)], "x: 3 prompt tokens and 38 new tokens exceed the limit of 40"),
        (
            [GenerationRequest("y", "y", np.array([100], np.int32), 0, 1)],
            r"y: a prompt token is not in \[0, 100\)",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_before_anybody_is_asked(
    make: Callable[..., World], wrong: list[GenerationRequest], message: str
) -> None:
    world = make()
    with pytest.raises(RolloutError, match=message):
        next(world.fleet.stream(wrong, PLAIN, 1))
    assert world.sent == []
    assert LIMITS.max_tokens == 40


def test_a_replica_is_asked_again_only_after_it_has_answered(make: Callable[..., World]) -> None:
    world = make()
    world.fleet.update(1)
    busy = {0: 0, 1: 0}

    def watched(index: int) -> Callable[[], None]:
        def act() -> None:
            busy[index] += 1
            assert busy[index] == 1, "it was asked twice at once"
            time.sleep(0.01)
            busy[index] -= 1

        return act

    for index in (0, 1):
        world.before[index, "submit_and_poll"] = [watched(index)] * 20
    assert keys_of(world) == KEYS
    assert world.events(ReplicaLost) == []


def test_all_that_were_started_are_ended(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.fleet.update(1)
    world.may_start[1] = threading.Event()
    world.fail_once(1, "submit_and_poll", WorkerDied("killed"))
    keys_of(world)
    world.may_start[1].set()
    world.fleet.close()
    assert sorted(index for index, _ in world.calls("shutdown")) == [0, 1, 1]  # the successor, which never served
    world.log.close()


PROBE = request("probe")


def probe(world: World, *, everyone: bool = False, version: int = 1) -> list[int]:
    answers = world.fleet.probe(PROBE, PLAIN, version, everyone=everyone)
    assert all((answer.key, answer.weight_version) == ("probe", version) for answer in answers.values())
    return sorted(answers)


def test_a_replica_that_is_new_is_probed_once_and_all_of_them_when_asked_for(make: Callable[..., World]) -> None:
    world = make(3)
    keys_of(world)
    world.asked.clear()
    assert probe(world) == [0, 1, 2]
    assert sorted(index for index, _ in world.calls("submit_and_poll")) == [0, 1, 2], "each of them the whole request"
    assert probe(world) == []
    assert probe(world, everyone=True) == [0, 1, 2]
    assert probe(world) == []


def test_the_successor_of_a_dead_replica_is_probed(make: Callable[..., World]) -> None:
    world = make()
    keys_of(world)
    assert probe(world) == [0, 1]
    world.fail_once(1, "submit_and_poll", WorkerDied("gone"))
    keys_of(world)
    keys_of(world, 2)
    assert world.num_started.count(1) == 2
    assert probe(world, version=2) == [1]


def test_a_replica_that_dies_of_a_probe_has_no_answer(make: Callable[..., World]) -> None:
    world = make()
    keys_of(world)
    world.fail_once(1, "submit_and_poll", WorkerDied("gone"))
    assert probe(world) == [0]
    (lost,) = world.events(ReplicaLost)
    assert (lost.replica, lost.num_unfinished) == (1, 1)
    keys_of(world)
    assert probe(world) == [1], "the new one"


def test_a_replica_that_waits_for_weights_is_not_probed_yet(make: Callable[..., World]) -> None:
    world = make()
    keys_of(world)
    assert probe(world, version=2) == [], "no replica holds these"
    assert probe(world) == [0, 1]


def test_a_rule_that_a_probe_breaks_is_said(make: Callable[..., World]) -> None:
    world = make()
    keys_of(world)
    replica = world.fleet._replicas[0]
    replica.held = None  # type: ignore[attr-defined]
    with pytest.raises(RolloutError, match="replica 0 is stale"):
        probe(world)


def test_an_engine_that_answers_nonsense_is_replaced_and_its_work_goes_to_others(make: Callable[..., World]) -> None:
    world = make()
    nonsense = [True]

    def spoil(index: int, made: list[Generated]) -> list[Generated]:
        if index == 1 and made and nonsense:
            nonsense.pop()
            return [replace(made[0], log_probs=np.full(1, np.nan, np.float32))]
        return made

    world.spoil = spoil
    samples = generate(world.fleet, WANTED, PLAIN, 1)
    assert [each.key for each in samples] == KEYS
    assert all(np.isfinite(each.log_probs).all() for each in samples)
    (lost,) = world.events(ReplicaLost)
    assert lost.reason.startswith("its answer is impossible: token 1 with log-prob nan in p")
    assert (lost.replica, lost.num_unfinished) == (1, 4)
    assert world.calls("shutdown") == [(1, ())]


def test_an_engine_whose_successor_answers_nonsense_too_is_named(make: Callable[..., World]) -> None:
    world = make(1)
    world.spoil = lambda _, made: [replace(each, token_ids=np.full(1, 100, np.int32)) for each in made]
    with pytest.raises(RolloutError, match=r"2 impossible answers; .* replica 0: token 100 .* in \[0, 100\)"):
        generate(world.fleet, WANTED, PLAIN, 1)
    assert len(world.events(ReplicaLost)) == 2
    assert probe(world) == []


def test_an_engine_that_never_finished_anything_is_blamed_and_no_prompt(make: Callable[..., World]) -> None:
    world = make(1)
    for _ in range(4):
        world.fail_once(0, "submit_and_poll", WorkerRaised("head size 16 is not supported\n  traceback"))
    with pytest.raises(RolloutError, match=r"4 replicas died before .* The last error: head size 16"):
        generate(world.fleet, WANTED[:2], PLAIN, 1)


def test_a_prompt_on_which_engines_die_that_served_others_is_blamed(make: Callable[..., World]) -> None:
    world = make(1)

    def spoil(_: int, made: list[Generated]) -> list[Generated]:
        if made and made[0].key.startswith("p0"):  # the last that a replica finishes
            raise WorkerDied("killed")
        return made

    world.spoil = spoil
    with pytest.raises(RolloutError, match="prompt p0: 4 replicas died while they generated from this prompt"):
        generate(world.fleet, WANTED, PLAIN, 1)


@pytest.mark.parametrize("again", ["at once", "with a later answer"])
def test_a_sample_that_is_delivered_twice_counts_once(make: Callable[..., World], again: str) -> None:
    world = make()
    first: list[Generated] = []

    def spoil(index: int, made: list[Generated]) -> list[Generated]:
        if index == 1 and made and len(first) < 2:
            first.append(made[0])
            return [made[0], made[0]] if again == "at once" else [first[0], *made[: len(first) - 1]]
        return made

    world.spoil = spoil
    samples = list(world.fleet.stream(WANTED, PLAIN, 1))
    assert sorted(each.key for each in samples) == sorted(KEYS), "each of them once"
    assert {"which was not requested" in event.reason for event in world.events(ReplicaLost)} == {True}


def test_what_a_replica_answers_after_it_was_let_go_is_forgotten(make: Callable[..., World]) -> None:
    world = make()
    world.fleet.update(1)
    late = threading.Event()

    def let_go() -> None:
        world.fleet._drop_replica(1, "it was silent")
        late.set()  # and then it answers all the same

    world.before[(1, "submit_and_poll")] = [let_go]
    samples = list(world.fleet.stream(WANTED, PLAIN, 1))
    assert late.is_set()
    assert sorted(each.key for each in samples) == sorted(KEYS), "each of them once, and none of them is missing"
    given = [each.key for _, args in world.calls("submit_and_poll") for each in args[0]]
    assert len(given) > len(KEYS), "others had to do what it had in hand"
