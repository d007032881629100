"""The environment `tools`: calls of a turn are answered by functions, and a turn without calls is the last.

What a model reads is up to whose fault it is. A `ValueError` of a tool says what the model got wrong, such as a page
that does not exist: the model reads "error: ..." and goes on. Anything else that a tool raises is a failure of the
tool, a service that is down or a bug: the conversation is tried again or left out. So is a subclass of `ValueError`,
which libraries raise over what they were sent, such as `json.JSONDecodeError`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from mrl.agents.environment import Done, Environment, Observation, Start, Task, ToolCall, Turn
from mrl.agents.tools import Tool
from mrl.config.agent import ToolConfig
from mrl.config.names import TOOLS
from mrl.errors import AgentError, NameUnknown, did_you_mean
from mrl.registry import load_attribute


class ToolEnvironment(Environment):
    """Answers every call of a turn, those of tools that are `async def` side by side; reward functions score the end.

    The parts `calls` and `failed_calls` count what the model called, and what of it was answered by an error: a call
    that cannot be read, a tool that does not exist, wrong arguments, or a `ValueError` of the tool.
    """

    def __init__(self, tools: Mapping[str, ToolConfig], max_result_characters: int = 20_000) -> None:
        """Offer these tools; what is longer than `max_result_characters` of a result is cut, and says so."""
        if not tools:
            raise AgentError("there are no tools", where="agent.environments", fix="tools: {calc: {name: calculator}}")
        self._tools = {name: Tool(load_tool(tool.name), tool.options, name) for name, tool in tools.items()}
        self._max_characters = max_result_characters
        self._parts = {"calls": 0.0, "failed_calls": 0.0}

    def reset(self, task: Task) -> Start:
        return Start(messages=task.messages, tools=[tool.schema for tool in self._tools.values()])

    async def step(self, turn: Turn) -> Observation | Done:
        if not turn.calls:
            return Done(parts=self._parts)
        self._parts["calls"] += len(turn.calls)
        running = [asyncio.ensure_future(self._result(call, turn)) for call in turn.calls]
        try:
            return Observation(results=await asyncio.gather(*running), parts=self._parts)
        finally:
            for one in running:  # where a tool has failed, the others need not go on
                one.cancel()

    async def _result(self, call: ToolCall, turn: Turn) -> str:
        try:
            if call.arguments is None:
                raise ValueError(call.problem)
            if call.name not in self._tools:
                raise ValueError(f"there is no tool {call.name!r:.60}; there are: {', '.join(self._tools)}")
            if not turn.left_turns:
                return "not called, for no turn is left"  # nobody would read what came of it
            text = await self._tools[call.name].call(call.arguments)
        except ValueError as error:
            if type(error) is not ValueError:
                raise
            self._parts["failed_calls"] += 1
            text = f"error: {error}"
        num_cut = len(text) - self._max_characters
        return text if num_cut <= 0 else f"{text[: self._max_characters]}\n... ({num_cut} more characters are cut)"


def load_tool(name: str) -> Callable[..., Any]:
    """Return the built-in tool of that name, or the function at `package.module:function`."""
    if ":" not in name and name not in TOOLS:
        fix = f"{did_you_mean(name, TOOLS)} Or name your own as package.module:function."
        raise NameUnknown(f'unknown tool "{name}"', where="agent.environments", fix=fix)
    found = load_attribute(TOOLS.get(name, name))
    if not callable(found):
        raise NameUnknown(f'"{name}" is no function', where="agent.environments")
    return found  # type: ignore[no-any-return]
