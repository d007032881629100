"""A repeated run with weights in flight: each engine gets the same calls before the same steps."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mrl.config.mesh import Mesh
from mrl.controller import RankInfo, Rendezvous
from mrl.errors import RolloutError
from mrl.rollout.replica import RolloutReplica
from mrl.rollout.requests import Sampling
from mrl.rollout.schedule import Schedule
from tests.rollout.counting_engine import SETTINGS, CountingEngine, request
from tests.rollout.stub_replicas import World
from tests.rollout.stub_replicas import request as wanted
from tests.rollout.test_newest_weights import Open, Trainer, until

PLAIN = Sampling()


class SlowEngine(CountingEngine):
    """An engine with slow steps, so that calls arrive between them."""

    def _step(self) -> Any:
        time.sleep(0.003)
        return super()._step()


def replica(**settings: Path) -> tuple[Any, CountingEngine]:
    place = RankInfo("rollout-0", 0, 0, Mesh(1), Rendezvous("127.0.0.1", 0, 1, None))
    made: Any = RolloutReplica(place, "tests.rollout.test_schedule:SlowEngine", replace(SETTINGS, **settings), 20.0)
    return made, made._thread._engine


def drive(made: Any, engine: CountingEngine, pause_s: float) -> list[tuple[str, int, tuple[tuple[int, int], ...]]]:
    """Run two samples that continue with newer weights, and a third that starts with them, with pauses in between."""
    made.receive_weights(1)
    found = made.submit_and_poll([request("a", 37), request("b", 33)], PLAIN, 1, 0.0)
    time.sleep(pause_s)
    made.receive_weights(2, "recompute")
    time.sleep(pause_s)
    found += made.submit_and_poll([request("c", 20)], PLAIN, 2, 0.0)
    time.sleep(pause_s)
    made.sleep(True)
    for part in ("weights", "kv_cache"):
        made.wake(part)
    made.receive_weights(3, "recompute")
    while len(found) < 3:
        found += made.submit_and_poll([], PLAIN, 3, 0.2)
    return [(sample.key, sample.weight_version, sample.switches) for sample in found]


@pytest.fixture
def recorded(tmp_path: Path) -> tuple[Path, list[Any], list[object]]:
    made, engine = replica(records=tmp_path)
    samples = drive(made, engine, pause_s=0.02)
    assert any(switches for _, _, switches in samples), "nothing came in flight"
    return tmp_path, samples, engine.notes


@pytest.mark.parametrize("pause_s", [0.0, 0.04])
def test_whoever_is_faster_or_slower_asks_at_the_same_steps(recorded: Any, pause_s: float) -> None:
    run, samples, notes = recorded
    made, engine = replica(replays=run)
    assert drive(made, engine, pause_s) == samples
    assert engine.notes == notes


def test_behind_its_end_an_engine_is_free(recorded: Any) -> None:
    made, engine = replica(replays=recorded[0])
    drive(made, engine, pause_s=0)
    answer = made.submit_and_poll([request("more", 2)], PLAIN, 3, 5.0)
    assert [sample.key for sample in answer] == ["more"]


def test_what_was_not_asked_then_is_refused(recorded: Any) -> None:
    made, _ = replica(replays=recorded[0])
    made.receive_weights(1)
    answer = made.submit_and_poll([request("other")], PLAIN, 1, 0.0)
    assert isinstance(answer, RolloutError)
    asked = "the replay calls start other after 0 steps, but the run called start a, b after 0 steps"
    assert f"{recorded[0]}/schedule/rollout-0.jsonl:3: {asked}" in str(answer)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "was started more than once"),
        ('[0, "begin"]\n[0, "weights", "1"]\n[0, "begin"]\n', "was started more than once"),
        ('[0, "begin"]\n[0, "flee"]\n', "not a call: .0, 'flee'."),
        ('[0, "begin"]\n[0, "sta', "not a schedule of an engine"),
        ("[" * 100_000, "not a schedule of an engine"),
    ],
)
def test_what_is_no_whole_schedule_is_refused(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "rollout-0.jsonl").write_text(text)
    with pytest.raises(RolloutError, match=says):
        Schedule(replays=tmp_path / "rollout-0.jsonl")


def test_a_run_without_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match=r"rollout-3.jsonl: an engine's schedule is missing: No such file"):
        Schedule(replays=tmp_path / "rollout-3.jsonl")


def test_a_fleet_asks_whom_the_run_asked_in_its_order(tmp_path: Path) -> None:
    """Weights that are available wait until both replicas have the earlier calls of the recorded run."""
    trainer, run = Trainer(), tmp_path / "run"
    calls = [
        [[0, "weights", "1"], [0, "start", "d"], [1, "start", "a", "e"], [3, "weights", "2"]],
        [[0, "weights", "1"], [0, "start", "b"], [1, "weights", "2"], [1, "start", "c"]],
    ]
    (run / "schedule").mkdir(parents=True)
    for number, of_one in enumerate(calls):
        lines = [json.dumps(call) + "\n" for call in ([0, "begin"], *of_one)]
        (run / "schedule" / f"rollout-{number}.jsonl").write_text("".join(lines))
    world = World(tmp_path, 2, newest=trainer.newest, replays=run)
    follow_ups = Open(*(wanted(key) for key in "abcd"))
    world.fleet.update(1)
    trainer.version = 2
    stream = world.fleet.stream([], PLAIN, 1, follow_ups, "recompute")
    found = {next(stream).key for _ in range(2)}
    assert found == {"d", "b"}
    assert len(world.calls("receive_weights")) == 2, "e is still to come, and a comes with it"
    follow_ups.ready = [wanted("e")]
    found |= {next(stream).key for _ in range(3)}
    assert found == set("abcde")
    until(lambda: world.fleet._schedule.next(0) is None and world.fleet._schedule.next(1) is None)
    started = [(index, [each.key for each in args[0]], args[2]) for index, args in world.calls("submit_and_poll")]
    assert [each for each in started if each[0] == 0 and each[1]] == [(0, ["d"], 1), (0, ["a", "e"], 1)]
    assert [each for each in started if each[0] == 1 and each[1]] == [(1, ["b"], 1), (1, ["c"], 2)]
    world.fleet.close()
    world.log.close()
