"""Deadlines of calls, without a cluster: fakes replace the clock and Ray."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mrl.controller import call
from mrl.controller.call import Call, RankFailure
from mrl.controller.node_agent import ProcessView
from mrl.errors import WorkerSilent


def test_a_deadline_runs_from_the_call_whenever_its_answer_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waited = [100.0], list[float]()

    def get(references: list[Any], timeout: float) -> None:
        waited.append(timeout)
        assert len(waited) < 10, "it never ends"
        now[0] += timeout
        raise call.GetTimeoutError  # Ray is imported by mrl alone, which asks it for tokens

    monkeypatch.setattr(call, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(call, "ray", SimpleNamespace(get=get))
    monkeypatch.setattr(Call, "_look", lambda *_: [])
    monkeypatch.setattr(Call, "_explain", lambda *_: WorkerSilent("no answer"))
    processes: Any = SimpleNamespace(deadlines=SimpleNamespace(heartbeat_s=5.0))
    asked = Call(processes, "update", {}, deadline_s=30.0)
    now[0] += 18.0  # other work meanwhile
    with pytest.raises(WorkerSilent):
        asked.wait()
    assert waited == [5.0, 5.0, 2.0], "twelve seconds were left"


def test_a_process_counts_as_stopped_that_was_so_at_two_looks_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    states = iter("TSTT")
    processes: Any = SimpleNamespace(poll_states=lambda ranks: {0: ProcessView(next(states))})
    monkeypatch.setattr(Call, "_unanswered", lambda _: [0])
    asked, looks = Call(processes, "update", {}, deadline_s=30.0), dict[int, int]()
    assert [asked._look(looks) for _ in range(4)] == [[], [], [], [0]]


def test_who_raised_and_is_gone_has_died_of_what_its_neighbor_may_have_met(monkeypatch: pytest.MonkeyPatch) -> None:
    raised = {rank: RankFailure(rank, "raised", "connection reset", at=float(rank)) for rank in range(2)}
    views = {0: ProcessView("S"), 1: ProcessView(None)}
    processes: Any = SimpleNamespace(poll_states=lambda ranks: views)
    monkeypatch.setattr(Call, "_unanswered", lambda _: [])
    monkeypatch.setattr(call, "_fault_of", lambda rank, reference: raised[rank])
    references: Any = dict.fromkeys(range(2))
    faults = Call(processes, "update", references, deadline_s=30.0)._faults()
    assert faults == [raised[0], RankFailure(1, "died", "its process has ended")]
