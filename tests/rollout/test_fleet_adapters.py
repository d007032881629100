"""A fleet whose replicas apply adapters: which of them get the frozen weights again, and who reads which file."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.errors import RolloutError, WorkerDied, WorkerRaised
from mrl.rollout.requests import Sampling
from tests.rollout.stub_replicas import World, generate, request


def serve(world: World, version: int) -> None:
    generate(world.fleet, [request("p0/0"), request("p1/0")], Sampling(), version)


def received(world: World) -> list[tuple[int, str, int]]:
    """Return replica, method and version of the weights that have arrived since the last call."""
    with world.lock:
        calls = [(index, name, args[0]) for index, name, args in world.asked if name.startswith("receive_")]
        world.asked.clear()
    return calls


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path, adapter_rank=4, written="ab", read="ab")


def test_replicas_that_stay_awake_get_the_frozen_weights_once(world: World) -> None:
    serve(world, 1)
    assert received(world) == [(0, "receive_weights", 1), (1, "receive_weights", 1)]
    serve(world, 2)
    assert received(world) == [(0, "receive_adapters", 2), (1, "receive_adapters", 2)]
    assert world.sent == [((0, 1), 1), ((), 2)]


def test_replicas_that_slept_get_them_again(world: World) -> None:
    serve(world, 1)
    world.fleet.sleep()
    received(world)
    serve(world, 2)
    assert received(world) == [(0, "receive_weights", 2), (1, "receive_weights", 2)]


def test_a_replica_that_died_or_failed_gets_them_again(world: World) -> None:
    serve(world, 1)
    world.fail_once(0, "receive_adapters", WorkerDied("gone"))
    world.fail_once(1, "receive_adapters", WorkerRaised("frozen weights have changed"))
    received(world)
    serve(world, 2)
    assert received(world)[-2:] == [(1, "receive_weights", 2), (0, "receive_weights", 2)]
    assert world.fleet.versions == {0: 2, 1: 2}


def test_adapters_of_another_file_end_the_run(world: World) -> None:
    world.read = "cd"
    with pytest.raises(RolloutError, match="replica 0 has loaded adapters with digest cd, but the trainer wrote ab"):
        serve(world, 1)


def test_without_adapters_all_weights_are_sent_each_time(tmp_path: Path) -> None:
    world = World(tmp_path)
    serve(world, 1)
    serve(world, 2)
    assert {name for _, name, _ in received(world)} == {"receive_weights"}
    assert world.sent == [((0, 1), 1), ((0, 1), 2)]
