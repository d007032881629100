"""The parts of the sweep cover all its cases, and a case that fails is recorded as failed until it passes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import sweep
from tests.sweep import NUM_PARTS, SlowHalf, SweepPart, SweepRecord, part_of

CASES = [f"tests/{file}.py::test[{number}]" for file in "abc" for number in range(13)]


def test_each_case_is_in_one_part_and_files_are_spread() -> None:
    parts = [part_of(CASES, number, NUM_PARTS) for number in range(NUM_PARTS)]
    assert sorted(case for part in parts for case in part) == sorted(CASES)
    assert {len(part) for part in parts} == {3, 4}
    assert all(len({case.partition("::")[0] for case in part}) == 3 for part in parts)


def test_the_record_has_the_last_pass_and_a_failure_since(tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    before = {"date": "2026-01-01", "commit": "abc", "minutes": 1.0}
    path.write_text(
        json.dumps({"other": before, "broken": before, "mended": before | {"failed": "2026-01-02"}, "skipped": before})
    )
    record = SweepRecord(path)
    outcomes = [("mended", "call", "passed"), ("broken", "call", "passed"), ("broken", "teardown", "failed")]
    for case, when, outcome in [*outcomes, ("skipped", "setup", "skipped"), ("new", "call", "failed")]:
        report: Any = SimpleNamespace(nodeid=case, when=when, duration=60.0)
        record.pytest_runtest_logreport(
            report.__class__(**vars(report), passed=outcome == "passed", failed=outcome == "failed")
        )
    record.pytest_sessionfinish()
    kept = json.loads(path.read_text())
    assert kept.keys() == {"other", "mended", "broken", "skipped"}, "a case that never passed has no record"
    assert kept["other"] == kept["skipped"] == before
    assert kept["mended"].keys() == before.keys()
    assert kept["mended"]["date"] > "2026-01-01"
    assert kept["broken"].pop("failed") > "2026-01-01"
    assert kept["broken"] == before


def test_only_a_case_without_a_record_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "RECORD", tmp_path / "sweep.json")
    sweep.RECORD.write_text(json.dumps({"proven": {}}))
    marks: dict[str, list[Any]] = {"proven": [], "new": []}
    items: list[Any] = [
        SimpleNamespace(nodeid=name, get_closest_marker=lambda _: True, add_marker=added.append)
        for name, added in marks.items()
    ]
    config: Any = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: None))
    SweepPart("1/1").pytest_collection_modifyitems(config, items)
    assert [item.nodeid for item in items] == ["proven", "new"]
    assert marks["proven"] == []
    assert [mark.name for mark in marks["new"]] == ["xfail"]


def test_each_slow_file_is_in_one_half_and_other_tests_are_in_both() -> None:
    marks = {"a": {"slow"}, "b": {"slow", "on_demand"}, "c": {"slow"}, "d": set(), "e": {"slow"}}
    config: Any = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: None))
    halves = []
    for choice in ("1/2", "2/2"):
        items: list[Any] = [
            SimpleNamespace(nodeid=f"{file}::{name}", get_closest_marker=some.__contains__)
            for file, some in marks.items()
            for name in ("first", "second")
        ]
        SlowHalf(choice).pytest_collection_modifyitems(config, items)
        halves.append("".join(item.nodeid[0] for item in items))
    assert halves == ["aabbddee", "bbccdd"]
