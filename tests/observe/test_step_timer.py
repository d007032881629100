"""Durations within a step: phases add up, each lap starts at zero, and the log has every phase."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from mrl.events import EventLog, PhaseBegin, PhaseEnd, read_events
from mrl.observe.metrics import StepTimer


class Watch:
    """A clock that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 50.0
        monkeypatch.setattr("mrl.observe.metrics.time", SimpleNamespace(perf_counter=lambda: self.now))


def test_seconds_of_phases_add_up_until_the_lap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, shown = Watch(monkeypatch), list[str]()
    events = EventLog(tmp_path / "events.jsonl")
    clock = StepTimer(events, shown.append)
    clock.step = 4
    for seconds in (2.0, 3.0):
        with clock("outer"):
            watch.now += 1.0
            with clock("inner"):
                watch.now += seconds
        watch.now += 0.5
    assert clock.pop_seconds() == {"outer": 7.0, "inner": 5.0, "step": 8.0}
    watch.now += 0.25
    assert clock.pop_seconds() == {"step": 0.25}
    assert shown == ["outer", "inner"] * 2
    found = [record.event for record in read_events(tmp_path / "events.jsonl")]
    assert found[:4] == [
        *[PhaseBegin("outer", 4), PhaseBegin("inner", 4)],
        *[PhaseEnd("inner", 4, 2.0), PhaseEnd("outer", 4, 3.0)],
    ]


def test_a_phase_that_fails_has_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Watch(monkeypatch)
    clock = StepTimer(EventLog(tmp_path / "events.jsonl"))
    with pytest.raises(KeyError), clock("rollout"):
        raise KeyError
    assert [record.event for record in read_events(tmp_path / "events.jsonl")] == [PhaseBegin("rollout", 0)]
    assert clock.pop_seconds() == {"step": 0.0}
