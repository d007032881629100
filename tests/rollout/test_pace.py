"""An engine that is far slower than the others is reported after several rollouts."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from mrl.events import EventLog, Warned, read_events
from mrl.rollout import scheduler
from mrl.rollout.requests import Generated, Sampling
from mrl.rollout.scheduler import Pace
from tests.rollout.stub_replicas import World, generate, request


def said(path: Path) -> list[Warned]:
    return [each.event for each in read_events(path) if isinstance(each.event, Warned)]


def test_only_who_is_slow_again_and_again_is_named_and_once(tmp_path: Path) -> None:
    kept = Pace(EventLog(tmp_path / "events.jsonl"))
    for rollout in range(8):
        for replica in range(4):
            is_slow = replica == 2 or (replica == 1 and rollout % 3)  # another is slow twice in a row, and fast again
            kept.note(replica, 100 if is_slow else 900, 5.0)
            kept.note(replica, 100 if is_slow else 900, 5.0)
        kept.note(4, 1, 0.5)  # it had next to nothing to do
        kept.rollout_ends()
        assert len(said(tmp_path / "events.jsonl")) == (rollout >= 2)
    (warning,) = said(tmp_path / "events.jsonl")
    what = "it generates 20 tokens/s, the others 180, for 3 rollouts in a row: does another process use its node?"
    assert warning == Warned("rollout-2", what)


def test_one_alone_is_compared_with_nobody(tmp_path: Path) -> None:
    kept = Pace(EventLog(tmp_path / "events.jsonl"))
    for _ in range(5):
        kept.note(0, 1, 100.0)
        kept.rollout_ends()
    assert said(tmp_path / "events.jsonl") == []


def test_a_fleet_names_its_slow_replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_LEAST_S", 0.01)
    world = World(tmp_path)

    def spoil(index: int, made: list[Generated]) -> list[Generated]:
        time.sleep(0.05 if index == 1 else 0.002)
        return made

    world.spoil = spoil
    for version in (1, 2, 3):
        world.fleet.update(version)
        generate(world.fleet, [request(f"{number}") for number in range(20)], Sampling(1.0, 1.0, 0), version)
    world.fleet.close()
    (warning,) = said(tmp_path / "events.jsonl")
    assert warning.about == "rollout-1"
