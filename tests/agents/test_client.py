"""Questions to environments: each question gets one answer, even if a process dies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mrl.agents.client import Again, EnvironmentAnswer, EnvironmentClient, environment_pool
from mrl.agents.environment import Done, Start, Task, Turn
from mrl.config.agent import AgentConfig, EnvironmentConfig
from mrl.errors import RewardError
from mrl.events import Event
from mrl.rewards.outcome import Failure

FACTS = {"a": "b"}


class Asked:
    """Environments that share one process, each with a name."""

    def __init__(self, directory: Path) -> None:
        world = EnvironmentConfig(name="tests.agents.worlds:Troubled", options={"directory": str(directory)})
        config = AgentConfig(environments={"world": world}, num_workers=1)
        self.events: list[Event] = []
        self.client: EnvironmentClient[str] = EnvironmentClient(environment_pool(config), self.events.append)
        self.tickets: dict[str, int] = {}

    def begin(self, *names: str) -> None:
        for name in names:
            extra_info = {"facts": FACTS, "trouble": name}
            messages = [{"role": "user", "content": "What is a?"}]
            task = Task(
                messages=messages, ground_truth="b", data_source="", extra_info=extra_info, uid=name, sample=0, seed=0
            )
            self.tickets[name] = self.client.begin(name, "world", task)

    def step(self, name: str, number: int) -> None:
        turn = Turn(number=number, text="b", calls=[], ended="stop", left_turns=1, left_tokens=100)
        self.client.step(self.tickets[name], name, turn)

    def hear(self) -> dict[str, Any]:
        """Return all answers by environment."""
        heard: dict[str, Any] = {}
        while (arriving := self.client.arriving()) is not None:
            arriving.result(60)
            for name, answer in self.client.answers():
                assert name not in heard, "one answer to each question"
                heard[name] = answer
        return heard


@pytest.fixture
def asked(tmp_path: Path) -> Iterator[Asked]:
    made = Asked(tmp_path)
    yield made
    made.client.close()


def lose_one_that_waits(asked: Asked) -> None:
    """Lose an environment that has no open question: another one kills the process of both."""
    asked.begin("", "killed")
    started = asked.hear()
    assert [type(started[name].said) for name in ("", "killed")] == [Start, Start]
    asked.step("killed", number=1)
    heard = asked.hear()
    assert list(heard) == ["killed"], "without a question there is no answer"
    assert isinstance(heard["killed"], Failure)
    assert heard["killed"].kind == "crashed"


def test_that_an_environment_was_lost_is_the_answer_to_the_next_turn(asked: Asked) -> None:
    lose_one_that_waits(asked)
    asked.step("", number=0)
    (answer,) = asked.hear().values()
    assert isinstance(answer, Again)
    assert "signal 9" in answer.why
    asked.begin("")
    asked.hear()
    asked.step("", number=0)
    (answer,) = asked.hear().values()
    assert isinstance(answer, EnvironmentAnswer)
    assert isinstance(answer.said, Done)


def test_an_environment_that_was_lost_may_be_let_go(asked: Asked) -> None:
    lose_one_that_waits(asked)
    asked.client.let_go(asked.tickets[""], "")
    assert asked.hear() == {}
    assert asked.events == []


def test_environments_whose_processes_end_at_once_are_not_called_rewards() -> None:
    config = AgentConfig(environments={"world": EnvironmentConfig(name="tests.agents.worlds:Lethal")}, num_workers=1)
    with pytest.raises(RewardError) as caught:
        environment_pool(config)
    assert str(caught.value) == "no agent worker can start; 3 in a row failed: its process exited with status 9"
