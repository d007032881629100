"""The end of a group: the node's agent kills processes that Ray did not end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mrl.config.mesh import Mesh
from mrl.config.schema import DeadlinesConfig
from mrl.controller import processes
from mrl.controller.node_agent import ProcessId, ProcessView
from mrl.controller.processes import NodeView, RankProcess, RankProcesses
from mrl.events import EventLog


class Agent:
    """Records its calls. Process 11 has ended already."""

    def __init__(self) -> None:
        self.asked: dict[str, list[int]] = defaultdict(list)

    def __getattr__(self, question: str) -> Any:
        return Question(self.asked[question])


class Question:
    """A method that is called like a Ray method."""

    def __init__(self, asked: list[int]) -> None:
        self._asked = asked

    def remote(self, of: list[ProcessId]) -> list[ProcessView]:
        self._asked += [process.pid for process in of]
        return [ProcessView(None if process.pid == 11 else "S") for process in of]


@pytest.fixture
def agents() -> list[Agent]:
    """Agents of two nodes."""
    return [Agent(), Agent()]


@pytest.fixture
def group(agents: list[Agent], tmp_path: Path) -> Iterator[RankProcesses]:
    """Two ranks on one node, and a third on the other."""
    unknown: Any = None
    nodes = [NodeView(f"id{n}", f"node{n}", agent, unknown, unknown) for n, agent in enumerate(agents)]
    events = EventLog(tmp_path / "events.jsonl")
    group = RankProcesses("actor", Mesh(3), tmp_path, events, DeadlinesConfig())
    group.add([RankProcess(f"actor{n}", ProcessId(10 + n, 1), nodes[n // 2]) for n in range(3)])
    yield group
    events.close()


def test_the_agents_see_that_every_process_ends(
    agents: list[Agent], group: RankProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[Any] = []
    monkeypatch.setattr(processes.ray, "kill", lambda actor, *, no_restart: ended.append((actor, no_restart)))
    monkeypatch.setattr(processes.ray, "get", lambda answer, timeout: answer)
    assert group.kill_all("a rank died") == [0, 2], "the ranks that still ran"
    assert ended == [(f"actor{number}", True) for number in range(3)]
    assert [agent.asked["kill_all"] for agent in agents] == [[10, 11], [12]]
    assert group.kill_all("again") == [], "once is enough"
    assert len(ended) == 3


def test_where_a_node_does_not_answer_its_processes_are_gone(
    group: RankProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(answer: list[ProcessView], timeout: float) -> list[ProcessView]:
        if len(answer) == 1:  # the other node's
            raise processes.RayError
        return answer

    monkeypatch.setattr(processes.ray, "get", get)
    assert group.poll_states([0, 1, 2]) == {0: ProcessView("S"), 1: ProcessView(None), 2: ProcessView(None)}


def test_all_nodes_are_asked_before_the_first_answer_is_read(
    agents: list[Agent], group: RankProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def get(answer: list[ProcessView], timeout: float) -> list[ProcessView]:
        asked.append(sum(len(agent.asked["poll_states"]) for agent in agents))
        return answer

    monkeypatch.setattr(processes.ray, "get", get)
    group.poll_states([0, 1, 2])
    assert asked == [3, 3]


def test_a_node_that_does_not_answer_is_waited_for_by_nobody_else() -> None:
    unknown: Any = None
    agent = Agent()
    node = NodeView("id", "node", agent, unknown, unknown)
    node.is_silent.set()
    assert processes.ask(node, lambda agent: agent.kill_all.remote([ProcessId(1, 1)])) is None
    assert not agent.asked
