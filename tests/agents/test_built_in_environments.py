"""The built-in environments in real processes: their answers through the pipe, and their failures."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from mrl.agents.client import EnvironmentAnswer, EnvironmentClient, environment_pool
from mrl.agents.environment import Done, Task, ToolCall, Turn
from mrl.agents.formats import load_format
from mrl.agents.retriever import Bm25, Retriever
from mrl.config.agent import AgentConfig, EnvironmentConfig, ToolConfig
from mrl.errors import RewardError
from mrl.rewards.outcome import Failure

TEXT = '"Ada"\nShe wrote notes.'
TASK = Task(messages=[{"role": "user", "content": "Who?"}])


@pytest.fixture
def retriever() -> Iterator[Retriever]:
    server = Retriever("127.0.0.1", 0, [{"contents": TEXT}], Bm25([TEXT]).find, 3)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def config(**environments: EnvironmentConfig) -> AgentConfig:
    return AgentConfig(environments=environments, num_workers=1, concurrency=64)


class Talk:
    """Conversations by number with the environments of one configuration."""

    def __init__(self, config: AgentConfig) -> None:
        self._client: EnvironmentClient[int] = EnvironmentClient(environment_pool(config), lambda event: None)
        self._tickets: dict[int, int] = {}

    def __enter__(self) -> Talk:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()

    def begin(self, label: str, num: int) -> list[Any]:
        for one in range(num):
            self._tickets[one] = self._client.begin(one, label, TASK)
        return self._answers(num)

    def step(self, calls: Sequence[ToolCall]) -> list[Any]:
        """Make these calls in all conversations."""
        turn = Turn(number=0, text="", calls=calls, ended="stop", left_turns=2, left_tokens=99)
        for one, ticket in self._tickets.items():
            self._client.step(ticket, one, turn)
        return self._answers(len(self._tickets))

    def _answers(self, num: int) -> list[Any]:
        heard: dict[int, Any] = {}
        while len(heard) < num:
            if (arriving := self._client.arriving()) is not None:
                arriving.result(60)
            heard |= dict(self._client.answers())
        return [answer.said if isinstance(answer, EnvironmentAnswer) else answer for _, answer in sorted(heard.items())]


def test_tools_answer_out_of_a_worker() -> None:
    tools = {"calc": ToolConfig(name="calculator"), "py": ToolConfig(name="python", options={"limit_s": 5.0})}
    with Talk(config(maths=EnvironmentConfig(tools=tools))) as talk:
        (started,) = talk.begin("maths", 1)
        assert [tool["function"]["name"] for tool in started.tools] == ["calc", "py"]
        assert list(started.tools[1]["function"]["parameters"]["properties"]) == ["code"]
        calls = [
            ToolCall(name="calc", arguments={"expression": "2**10"}),
            ToolCall(name="py", arguments={"code": "print(6 * 7)"}),
            ToolCall(name="py", arguments={"code": "import os; os.kill(os.getppid(), 9)"}),
            ToolCall(name="calc", arguments={}),
        ]
        (answered,) = talk.step(calls)
        assert answered.results[:2] == ["1024", "42"]
        assert "PermissionError" in answered.results[2]
        assert answered.parts == {"calls": 4, "failed_calls": 2}
        assert talk.step([]) == [Done(parts={"calls": 4, "failed_calls": 2})]


def test_searches_of_many_conversations_of_a_worker_are_few_requests(retriever: Retriever) -> None:
    num_asked, answer = 0, retriever.answer

    def counted(asked: Any) -> dict[str, Any]:
        nonlocal num_asked
        num_asked += 1
        return answer(asked)

    retriever.answer = counted  # type: ignore[method-assign]
    world = EnvironmentConfig(name="search_r1", options={"url": retriever.url}, format="search_r1")
    parse = load_format("search_r1").parse
    with Talk(config(nq=world)) as talk:
        assert len(talk.begin("nq", 50)) == 50
        for answered in talk.step(parse("<search>ada notes</search>")):
            assert answered.results == ['Doc 1(Title: "Ada") She wrote notes.\n']
        assert num_asked < 25
        ended = talk.step(parse("<answer>Ada</answer>"))
        assert ended == [Done(parts={"searches": 1, "invalid_turns": 0})] * 50


def test_a_retriever_that_is_down_or_goes_down_is_a_failure_that_says_so(retriever: Retriever) -> None:
    options = {"url": retriever.url, "attempts": 2, "backoff_s": 0.01}
    with Talk(config(nq=EnvironmentConfig(name="search_r1", options=options, format="search_r1"))) as talk:
        talk.begin("nq", 1)
        retriever.answer = None  # type: ignore[assignment, method-assign]  # each request ends without an answer
        (failed,) = talk.step(load_format("search_r1").parse("<search>a</search>"))
        assert isinstance(failed, Failure)
        assert failed.kind == "raised"
        assert f"{retriever.url} gave no answer in 2 attempts" in failed.detail
    options["url"] = "http://127.0.0.1:9/retrieve"
    with Talk(config(nq=EnvironmentConfig(name="search_r1", options=options, format="search_r1"))) as talk:
        (failed,) = talk.begin("nq", 1)  # `mrl check` reports this
        assert failed.detail.startswith("search: http://127.0.0.1:9/retrieve gave no answer in 2 attempts")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (EnvironmentConfig(tools={"s": ToolConfig(name="search")}), "tool s: the tool needs the option url"),
        (EnvironmentConfig(tools={"c": ToolConfig(name="calcolator")}), 'did you mean "calculator"'),
        (EnvironmentConfig(), "missing a required argument: 'tools'"),
        (EnvironmentConfig(name="search_r1"), "missing a required argument: 'url'"),
        (EnvironmentConfig(name="search_r1", options={"url": "localhost"}), "'localhost' is not an address"),
    ],
)
def test_a_wrong_environment_is_known_before_there_is_a_conversation(
    environment: EnvironmentConfig, message: str
) -> None:
    with pytest.raises(RewardError) as caught:
        environment_pool(config(wrong=environment))
    assert message in str(caught.value)
