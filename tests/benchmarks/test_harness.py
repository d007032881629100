"""The harness measures fairly, reports honestly, and fails if a goal is missed."""

from __future__ import annotations

import json
import math
import socket
from pathlib import Path

import pytest

from benchmarks.harness import Benchmark, Timing, command, interleave, parser, speedup


def test_candidates_take_turns_in_alternating_order_after_a_warm_up() -> None:
    calls: list[str] = []
    times = interleave({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, repeats=3)
    assert "".join(calls) == "ab" + "ab" + "ba" + "ab"
    assert {name: len(timing.seconds) for name, timing in times.items()} == {"a": 3, "b": 3}


def test_median_and_spread() -> None:
    timing = Timing((1.0, 3.0, 2.0, 4.0, 99.0))
    assert (timing.median_s, timing.spread_s) == (3.0, 2.0), "one disturbed repeat moves neither"
    assert timing.columns("ours") == {"ours_s": 3.0, "ours_spread_s": 2.0}
    assert Timing((5.0,)).spread_s == 0.0


def test_a_difference_within_the_spread_is_none() -> None:
    assert speedup(Timing((1.0, 1.0, 1.0)), Timing((4.0, 4.0, 4.0))) == 4.0
    assert speedup(Timing((4.0, 4.0, 4.0)), Timing((1.0, 1.0, 1.0))) == 0.25
    assert speedup(Timing((1.0, 1.0, 1.0)), Timing((1.0, 1.1, 1.4))) == 1.0
    assert speedup(Timing((1.0, 3.0, 9.0)), Timing((4.0, 4.0, 4.0))) == 1.0


@pytest.mark.parametrize(
    ("value", "bounds", "met"),
    [
        (10.0, {"at_least": 10}, True),
        (9.9, {"at_least": 10}, False),
        (10.0, {"at_most": 10}, True),
        (10.1, {"at_most": 10}, False),
        (math.nan, {"at_least": 0}, False),
    ],
)
def test_goals(value: float, bounds: dict[str, float], met: bool) -> None:
    bench = Benchmark("x")
    bench.goal("speed", value, **bounds)
    assert [goal["met"] for goal in bench.goals] == [met]
    assert bench.finish(parser("x").parse_args([])) == (0 if met else 1)


@pytest.mark.parametrize("bounds", [{}, {"at_least": 1, "at_most": 2}])
def test_a_goal_has_one_bound(bounds: dict[str, float]) -> None:
    with pytest.raises(ValueError, match='goal "speed" needs either'):
        Benchmark("x").goal("speed", 1, **bounds)


def test_the_file_holds_everything_but_the_name_of_the_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = Benchmark("data_plane")
    bench.row(name="hop", ours_s=0.5)
    bench.goal("hops per second", 2.0, at_least=1)
    file = tmp_path / "result.json"
    assert bench.finish(parser("x").parse_args(["--json", str(file)])) == 0
    written = json.loads(file.read_text())
    assert list(written) == ["benchmark", "command", "machine", "versions", "rows", "goals"]
    assert written["benchmark"] == "data_plane"
    assert written["rows"] == [{"name": "hop", "ours_s": 0.5}]
    assert written["goals"] == [{"name": "hops per second", "goal": ">= 1", "value": 2.0, "met": True}]
    assert {"cpu", "cores", "memory_bytes", "load_average_before"} <= set(written["machine"])
    assert written["versions"]["torch"]
    assert socket.gethostname() not in file.read_text()
    assert capsys.readouterr().out.splitlines() == [
        "name  ours_s",
        "hop   0.5",
        "met     hops per second: 2, goal >= 1",
    ]


def test_the_command_is_what_reproduces_a_run() -> None:
    words = ["/somewhere/benchmarks/data.py", "--rows", "5", "--json", "out.json", "--repeats", "2"]
    assert command(words) == "python benchmarks/data.py --rows 5 --repeats 2"
