"""Functions answer calls in order. A mistake of the model is an answer in text, a mistake of a tool is a failure."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from mrl.agents.environment import Done, Observation, Start, Task, ToolCall, Turn
from mrl.agents.tools import ToolEnvironment
from mrl.config.agent import ToolConfig
from mrl.errors import AgentError, NameUnknown

USER = {"role": "user", "content": "Where?"}
HERE = "tests.agents.test_tool_environment"
CANCELLED: list[str] = []


def read(page: str, *, root: str = "/") -> str:
    """Read a page."""
    if page == "none":
        raise ValueError("there is no such page")
    if page == "down":
        raise ConnectionError("no route")
    if page == "garbage":
        json.loads("<html>")
    return f"{root}/{page} ö"


async def wait(seconds: float) -> str:
    """Wait."""
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        CANCELLED.append("wait")
        raise
    return "waited"


def environment(**options: Any) -> ToolEnvironment:
    tools = {"open": ToolConfig(name=f"{HERE}:read", options={"root": "wiki"}), "wait": ToolConfig(name=f"{HERE}:wait")}
    return ToolEnvironment(tools=tools, **options)


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


def turn(*calls: ToolCall, left_turns: int = 3) -> Turn:
    return Turn(number=0, text="...", calls=calls, ended="stop", left_turns=left_turns, left_tokens=99)


def step(world: ToolEnvironment, *calls: ToolCall, left_turns: int = 3) -> Observation | Done:
    return asyncio.run(world.step(turn(*calls, left_turns=left_turns)))  # type: ignore[arg-type]


def test_the_conversation_begins_with_the_prompt_and_the_schemas_of_the_tools() -> None:
    started = environment().reset(Task(messages=[USER]))
    assert isinstance(started, Start)
    assert [*started.messages] == [USER]
    assert [tool["function"]["name"] for tool in started.tools] == ["open", "wait"]
    assert [*started.tools[0]["function"]["parameters"]["properties"]] == ["page"]


def test_every_call_of_a_turn_has_its_answer_in_its_place_and_failed_ones_are_counted() -> None:
    calls = [
        call("open", page="Rome"),
        ToolCall(name="", problem="The call is not valid JSON."),
        call("close"),
        call("open", page="none"),
        call("open", page="Rome", root="/"),
        call("open"),
    ]
    answered = step(environment(), *calls)
    assert isinstance(answered, Observation)
    assert answered.results == [
        "wiki/Rome ö",
        "error: The call is not valid JSON.",
        "error: there is no tool 'close'; there are: open, wait",
        "error: there is no such page",
        "error: the call of open is wrong: there is no root; there are: page",
        "error: the call of open is wrong: page is missing",
    ]
    assert answered.parts == {"calls": 6, "failed_calls": 5}


def test_a_turn_without_calls_is_the_last_and_tells_the_sums_of_all_turns() -> None:
    world = environment()
    step(world, call("open", page="Rome"), call("open", page="none"))
    step(world, call("open", page="Rome"))
    assert step(world) == Done(parts={"calls": 3, "failed_calls": 1})


@pytest.mark.parametrize(("page", "error"), [("down", ConnectionError), ("garbage", json.JSONDecodeError)])
def test_a_tool_that_is_down_is_no_observation(page: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        step(environment(), call("open", page=page))


def test_calls_of_a_turn_wait_side_by_side_and_a_failure_ends_the_others() -> None:
    began = time.monotonic()
    answered = step(environment(), *[call("wait", seconds=0.2)] * 20)
    assert isinstance(answered, Observation)
    assert answered.results == ["waited"] * 20
    assert time.monotonic() - began < 2
    with pytest.raises(ConnectionError):
        step(environment(), call("wait", seconds=60), call("open", page="down"))
    assert CANCELLED == ["wait"]


def test_a_long_result_is_cut_and_says_so() -> None:
    answered = step(environment(max_result_characters=6), call("open", page="Rome"), call("open", page="R"))
    assert isinstance(answered, Observation)
    assert answered.results[0] == "wiki/R\n... (5 more characters are cut)"


def test_nothing_is_called_in_the_last_turn() -> None:
    answered = step(environment(), call("open", page="down"), left_turns=0)
    assert isinstance(answered, Observation)
    assert answered.results == ["not called, for no turn is left"]


def test_a_tool_that_does_not_exist_is_named() -> None:
    with pytest.raises(NameUnknown, match='unknown tool "serch"\n  fix: did you mean "search"'):
        ToolEnvironment(tools={"search": ToolConfig(name="serch")})
    with pytest.raises(AgentError, match="no tool is configured"):
        ToolEnvironment(tools={})
