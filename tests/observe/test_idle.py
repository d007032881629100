"""Idle times of processes whose spans are known: causes, sums, the critical path, and the written trace."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from mrl.observe.idle import DRIVER, ENGINE, ENVIRONMENT, RANK, Row, StepTimes
from mrl.observe.intervals import common, minus, seconds, union
from mrl.observe.trace import steps_of, summary, write_trace
from mrl.spans import Span

S = 1_000_000_000


def span(name: str, begin: float, end: float | None, thread: str = "MainThread", **facts: Any) -> Span:
    return Span(name, int(begin * S), None if end is None else int(end * S), thread, facts)


def rows() -> list[Row]:
    """A step of ten seconds: five of rollout, with a pause for environments, and four of an update."""
    driver = [
        span("step 1", 0, 10),
        span("rollout", 0, 5.5),
        span("rollout-0.submit_and_poll", 0.5, 5, "replica_0"),
        span("wait for rewards", 5, 5.5),
        span("update_actor", 5.5, 9.75),
        span("actor.update_actor", 5.75, 9.75),
    ]
    moved = {"bytes_sent": 2_000_000, "bytes_to_engine": 1_000_000}
    actor = [span("update_actor", 6, 9.5), span("transfer", 6, 6.5, **moved)]
    steady = [span("generate", 0.5, 2, "engine_0"), span("generate", 3, 5, "engine_0"), span("submit_and_poll", 0.5, 5)]
    dying = [span("generate", 0.5, 1.5, "engine_0"), span("generate", 3, 4, "engine_0", ended=False)]
    samples = [span("sample", 1.75, 3, ""), span("sample", 2, 2.5, "")]
    return [
        Row("driver", DRIVER, "driver", driver),
        Row("actor rank 0", RANK, "actor", actor, "MainThread"),
        Row("actor rank 1", RANK, "actor", [span("update_actor", 6, 8)], "MainThread"),
        Row("rollout-0", ENGINE, "rollout-0", steady, "engine_0"),
        Row("rollout-1", ENGINE, "rollout-1", dying, "engine_0", "its process has ended: killed"),
        Row("agent worker 7", ENVIRONMENT, ENVIRONMENT, samples),
    ]


@pytest.fixture
def apart() -> StepTimes:
    (step,) = steps_of(rows(), {"actor": "trainers", "rollout": "engines"})
    return step


def idle(step: StepTimes, name: str) -> dict[str, float]:
    return {cause: seconds(times) for cause, times in step.idle[name].items()}


def test_each_idle_moment_has_one_cause(apart: StepTimes) -> None:
    waits = {"engines generate": 3.5, "environments work": 1.0, "rewards are computed": 0.5}
    assert idle(apart, "actor rank 0") == waits | {"calls and their answers travel": 0.5, "the driver works": 1.0}
    slower = {"slower ranks of its role work": 1.5, "calls and their answers travel": 0.5, "the driver works": 1.0}
    assert idle(apart, "actor rank 1") == waits | slower
    assert idle(apart, "rollout-0")["environments work"] == 1.0
    assert idle(apart, "rollout-0")["actor works"] == 3.5
    assert idle(apart, "agent worker 7") == {"nothing to do": 8.75}
    assert idle(apart, "driver") == waits | {"actor works": 3.5, "calls and their answers travel": 0.5}


def test_an_engine_without_samples_waits_for_the_longest_ones_until_it_dies(apart: StepTimes) -> None:
    parts = {"only other engines generate": 0.25, "environments work": 1.25, "has ended": 6.0, "the driver works": 0.5}
    assert idle(apart, "rollout-1") == parts


def test_only_devices_of_other_pools_count_as_idle_while_another_role_works(apart: StepTimes) -> None:
    text = "\n".join(summary([apart]))
    assert "     3.500 s  35 %  actor: engines generate: asynchrony.ahead" in text
    (shared,) = steps_of(rows(), {"actor": "all", "rollout": "all"})
    assert "asynchrony.ahead" not in "\n".join(summary([shared])), "they take turns on the same devices"
    assert "rollout-1 [its process has ended: killed]: busy" in text


def test_the_critical_path_adds_up_to_the_step(apart: StepTimes) -> None:
    path = list(apart.critical_path())
    assert sum(spent for *_, spent in path) == pytest.approx(10)
    assert ("rollout", "rollout-0 generates, the last to finish", 3.5) in path
    assert ("update_actor", "actor.update_actor, longest on actor rank 0", 4.0) in path
    assert ("update_actor", "the driver works", 0.25) in path


def test_the_trace_has_every_process_and_adds_up(apart: StepTimes, tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", [apart], {"processes": []})
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert list(names.values())[3:] == ["rollout-0", "rollout-1 (its process has ended: killed)", "agent worker 7"]
    lines: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in (event for event in events if event["ph"] == "X"):
        lines[event["tid"]].append(event)
        assert event["tid"] // 10_000 == event["pid"], "a viewer takes a number in two processes for one thread"
    for slices in lines.values():
        ends: list[int] = []
        for event in sorted(slices, key=lambda event: (event["ts"], -event["dur"])):
            while ends and ends[-1] <= event["ts"]:
                ends.pop()
            assert not ends or event["ts"] + event["dur"] <= ends[-1], "slices of a line lie apart or inside each other"
            ends.append(event["ts"] + event["dur"])
    total = sum(event["dur"] for event in events if event["name"].startswith("idle: ") and event["pid"] == 2)
    assert total == (10 - 3.5) * 1e6
    assert any(event["name"] == "transfer (3 MB)" for event in events)
    assert any(event.get("args", {}).get("ended") is False for event in events)


def test_sets_of_times() -> None:
    assert union([(5, 9), (1, 3)], [(2, 4), (7, 7)]) == [(1, 4), (5, 9)]
    assert common([(0, 4), (6, 9)], [(1, 2), (3, 7)]) == [(1, 2), (3, 4), (6, 7)]
    assert minus([(0, 4), (6, 9)], [(1, 2), (3, 7)]) == [(0, 1), (2, 3), (7, 9)]
    assert minus([(3, 5)], [(0, 1), (6, 7)]) == [(3, 5)]


def test_ranks_wait_for_the_role_that_works_while_engines_generate_ahead() -> None:
    ahead = [row for row in rows() if row.role in ("driver", "actor")]
    ahead.append(Row("critic rank 0", RANK, "critic", [], "MainThread"))
    ahead.append(Row("rollout-0", ENGINE, "rollout-0", [span("generate", 0, 10, "engine_0")], "engine_0"))
    (step,) = steps_of(ahead, {"actor": "trainers", "critic": "trainers", "rollout": "engines"})
    assert idle(step, "critic rank 0") == {"actor works": 3.5, "engines generate": 6.5}
    assert idle(step, "rollout-0") == {}
