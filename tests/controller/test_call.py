"""Deadlines of calls, without a cluster: fakes replace the clock and Ray."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mrl.controller import call
from mrl.controller.call import Call, RankFailure
from mrl.controller.node_agent import ProcessView
from mrl.controller.node_calls import ANSWERED, RAISED
from mrl.errors import WorkerDied, WorkerError, WorkerRaised, WorkerSilent


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


def test_a_stopped_process_that_has_answered_its_agent_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver only knows that a part of the node has not answered."""
    processes: Any = SimpleNamespace(poll_states=lambda ranks: dict.fromkeys(ranks, ProcessView("T")))
    monkeypatch.setattr(Call, "_unanswered", lambda _: [1, 2])
    monkeypatch.setattr(call, "outcomes_of", lambda nodes, *_: {1: [ANSWERED, None, None], 2: None})
    nodes: Any = [SimpleNamespace(ranks=[1, 2])]
    asked, looks = Call(processes, "update", {}, deadline_s=30.0, nodes=nodes), dict[int, int]()
    assert [asked._look(looks) for _ in range(2)] == [[], [2]]


def test_who_raised_and_is_gone_has_died_of_what_its_neighbor_may_have_met(monkeypatch: pytest.MonkeyPatch) -> None:
    raised = {rank: RankFailure(rank, "raised", "connection reset", at=float(rank)) for rank in range(2)}
    views = {0: ProcessView("S"), 1: ProcessView(None)}
    processes: Any = SimpleNamespace(poll_states=lambda ranks: views)
    monkeypatch.setattr(Call, "_unanswered", lambda _: [])
    monkeypatch.setattr(call, "_fault_of", lambda rank, reference: raised[rank])
    references: Any = dict.fromkeys(range(2))
    faults = Call(processes, "update", references, deadline_s=30.0)._faults()
    assert faults == [raised[0], RankFailure(1, "died", "its process has ended")]


def test_faults_of_ranks_that_are_called_by_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outcomes come from the agents. If an agent has ended, all its ranks count as dead."""
    outcomes: dict[int, Any] = {0: [ANSWERED, None, None], 1: [RAISED, "row 7 is bad", 1.0, "its trace"], 2: None}
    nodes: Any = [
        SimpleNamespace(ranks=[0, 1, 2], reference="rank 1 has failed"),
        SimpleNamespace(ranks=[3, 4], reference="its agent has ended"),
        SimpleNamespace(ranks=[5], reference="all have answered"),
    ]
    monkeypatch.setattr(call, "_ranks_have_failed", "rank 1 has failed".__eq__)
    ends = {"its agent has ended": "died"}
    monkeypatch.setattr(call, "_fault_of", lambda rank, reference: _fault(rank, ends.get(reference)))
    monkeypatch.setattr(Call, "_unanswered", lambda _: [])
    views = {rank: ProcessView("S") for rank in range(6)}
    asked = Call(SimpleNamespace(poll_states=lambda _: views), "update", {}, 30.0, nodes=nodes)  # type: ignore[arg-type]
    asked._outcomes = outcomes
    assert [(fault.rank, fault.kind) for fault in asked._faults()] == [
        (1, "raised"),
        (2, "silent"),
        (3, "died"),
        (4, "died"),
    ]


def _fault(rank: int, kind: str | None) -> RankFailure | None:
    return None if kind is None else RankFailure(rank, kind, "")


@pytest.mark.parametrize(
    ("ended", "gone", "error", "culprit", "kills"),
    [
        ({1: "its worker ended"}, set(), WorkerDied, 1, True),
        ({0: "row 7 is bad"}, set(), WorkerRaised, 0, False),
        ({0: "connection reset", 1: "its worker ended"}, set(), WorkerDied, 1, True),
        ({0: "connection reset"}, {1}, WorkerDied, 1, True),
    ],
    ids=[
        "a follower failed",
        "the leader raised",
        "both",
        "the leader raised before its follower was known to be dead",
    ],
)
def test_a_call_of_rank_0_fails_with_the_ranks_that_follow_it(
    ended: dict[int, str],
    gone: set[int],
    error: type[WorkerError],
    culprit: int,
    kills: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wait(references: list[Any], num_returns: int = 1, timeout: float = 0) -> Any:
        done = [reference for reference in references if reference in ended]
        return done, [reference for reference in references if reference not in ended]

    def get(references: list[Any], timeout: float) -> None:
        assert 0 in ended, "it waits for rank 0 although the follower has ended"
        raise call.RayError

    killed: list[str] = []
    views = {rank: ProcessView(None if rank in gone else "S") for rank in range(2)}
    processes: Any = SimpleNamespace(
        role="rollout-0",
        deadlines=SimpleNamespace(heartbeat_s=5.0, release_s=0.0),
        events=SimpleNamespace(write=lambda event: None),
        poll_states=lambda ranks: views,
        cause_of_death=lambda rank, detail: (detail, ()),
        kill_all=lambda reason: killed.append(reason) or [0, 1],
        name=lambda rank: f"rank {rank}",
        node=lambda rank: "node",
        stacks=lambda ranks: dict.fromkeys(ranks, ""),
        log_tail=lambda rank, num_lines: ("log", ""),
    )
    monkeypatch.setattr(call, "ray", SimpleNamespace(get=get, wait=wait))
    monkeypatch.setattr(
        call, "_fault_of", lambda rank, reference: RankFailure(rank, "raised", ended[rank], at=float(-rank))
    )
    following: Any = {1: 1}
    with pytest.raises(error) as caught:
        Call(processes, "step", {0: 0}, deadline_s=30.0, followers=following).wait()  # type: ignore[dict-item]
    assert caught.value.ranks == (culprit,)
    assert bool(killed) == kills, "an engine that only raised serves on"
