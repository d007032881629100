"""Tools from plain functions, and the environment `tools`, whose turns without a call are the last.

A function's keyword-only parameters, and whatever `options` give, are the configuration's: no model is told of them.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from mrl.agents.environment import Done, Environment, Observation, Start, Task, ToolCall, Turn
from mrl.config.agent import ToolConfig
from mrl.config.names import TOOLS
from mrl.errors import AgentError, NameUnknown, did_you_mean
from mrl.registry import load_attribute

_TYPES: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", NoneType: "null"}
_KINDS: dict[str, tuple[type, ...]] = {
    **{name: (kind,) for kind, name in _TYPES.items()},
    "number": (int, float),
    "array": (list,),
    "object": (dict,),
}
_ARGUMENTS = re.compile(r"\n\s*Args:\s*\n(.*?)(\n\s*\n|\n\s*(Returns|Raises):|\Z)", re.DOTALL)


class Tool:
    """A function with the schema that a model is shown; `options` are arguments that the model does not give."""

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any] | None = None, name: str = "") -> None:
        self.name = name or function.__name__
        self._function = partial(function, **(options or {}))
        self.schema = tool_schema(function, self.name, options=set(options or {}))

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Return the function's result as text; what is wrong with the arguments is a `ValueError`."""
        if problems := list(violations(arguments, self.schema["function"]["parameters"])):
            raise ValueError(f"the call of {self.name} is wrong: {'; '.join(problems)}")
        result = self._function(**arguments)
        if inspect.isawaitable(result):
            result = await result
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)


def tool_schema(function: Callable[..., Any], name: str, options: set[str]) -> dict[str, Any]:
    """Return the schema in the field's form: name, description, and parameters as a JSON schema."""
    description, _, _ = (inspect.getdoc(function) or "").partition("\n\n")
    hints, of_parameters = get_type_hints(function), dict(_described(function))
    taken = inspect.signature(function).parameters
    if unknown := options - taken.keys():
        raise AgentError(f"it takes no {min(unknown)}", where=f"tool {name}", fix=did_you_mean(min(unknown), taken))
    for_options = {one.name for one in taken.values() if one.kind is one.KEYWORD_ONLY}
    if missing := [one for one in sorted(for_options - options) if taken[one].default is inspect.Parameter.empty]:
        needed = missing[0]
        raise AgentError(f"it needs the option {needed}", where=f"tool {name}", fix=f"options: {{{needed}: ...}}")
    properties = {}
    for parameter in (one for one in taken.values() if one.name not in options | for_options):
        where = f"tool {name}, parameter {parameter.name}"
        if parameter.name not in hints or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise AgentError("a tool's parameters have a type each", where=where, fix=f"{parameter.name}: str")
        about = {"description": of_parameters[parameter.name]} if parameter.name in of_parameters else {}
        properties[parameter.name] = _schema_of(hints[parameter.name], where) | about
    required = [one for one in properties if taken[one].default is inspect.Parameter.empty]
    if not description:
        raise AgentError("the model is told what a tool does", where=f"tool {name}", fix="give it a docstring")
    parameters = {"type": "object", "properties": properties, "required": required}
    return {
        "type": "function",
        "function": {"name": name, "description": " ".join(description.split()), "parameters": parameters},
    }


def violations(value: Any, schema: Mapping[str, Any], where: str = "") -> Iterator[str]:
    """Yield, in words for the model, where a value is not of its schema."""
    place = where or "the call"
    if "anyOf" in schema:
        found = [list(violations(value, choice, where)) for choice in schema["anyOf"]]
        yield from min(found, key=len) if all(found) else ()
    kind = schema.get("type")
    if kind is not None and (not isinstance(value, _KINDS[kind]) or (kind != "boolean" and isinstance(value, bool))):
        yield f"{place} is {json.dumps(value, ensure_ascii=False)[:40]}, and has to be of type {kind}"
    elif "enum" in schema and value not in schema["enum"]:
        yield f"{place} is {json.dumps(value)[:40]}, and has to be one of {json.dumps(schema['enum'])}"
    elif kind == "array":
        for number, item in enumerate(value):
            yield from violations(item, schema.get("items", {}), f"{place}[{number}]")
    elif kind == "object":
        known, more = schema.get("properties", {}), schema.get("additionalProperties", False)
        yield from (f"{name} is missing" for name in schema.get("required", ()) if name not in value)
        for name, item in value.items():
            inner = f"{where}.{name}" if where else name
            if name in known or more is not False:
                yield from violations(item, known.get(name, more), inner)
            else:
                yield f"there is no {inner}; there are: {', '.join(known) or 'no parameters'}"


def _schema_of(hint: Any, where: str) -> dict[str, Any]:
    origin, inner = get_origin(hint), get_args(hint)
    if hint in _TYPES:
        return {"type": _TYPES[hint]}
    if origin in (Union, UnionType):
        return {"anyOf": [_schema_of(choice, where) for choice in inner]}
    if origin is Literal and len({type(choice) for choice in inner}) == 1:
        return {"type": _TYPES[type(inner[0])], "enum": list(inner)}
    if hint is list or origin in (list, Sequence):
        return {"type": "array"} | ({"items": _schema_of(inner[0], where)} if inner else {})
    if hint is dict or (origin in (dict, Mapping) and inner[0] is str):
        return {"type": "object", "additionalProperties": _schema_of(inner[1], where) if inner else {}}
    fix = "str, int, float, bool, list[...], dict[str, ...], Literal[...] or a union of them"
    raise AgentError(f"{hint} has no JSON schema", where=where, fix=fix)


def _described(function: Callable[..., Any]) -> Iterator[tuple[str, str]]:
    """Yield parameters and what the docstring says of them below `Args:`."""
    names = "|".join(inspect.signature(function).parameters)
    if listed := _ARGUMENTS.search(inspect.getdoc(function) or ""):
        pieces = re.split(rf"^\s*({names})(?: \(.*?\))?:", listed[1], flags=re.MULTILINE)[1:]
        yield from ((name, " ".join(text.split())) for name, text in zip(pieces[::2], pieces[1::2], strict=True))


class ToolEnvironment(Environment):
    """Answers every call of a turn, those of tools that are `async def` side by side; reward functions score the end.

    The parts `calls` and `failed_calls` count what the model called, and what of it was answered by an error: a call
    that cannot be read, a tool that does not exist, wrong arguments, or a `ValueError` of the tool.

    What a model reads is up to whose fault it is. A `ValueError` of a tool says what the model got wrong, such as a
    page that does not exist: the model reads "error: ..." and goes on. Anything else that a tool raises is a failure of
    the tool, a service that is down or a bug: the conversation is tried again or left out. So is a subclass of
    `ValueError`, which libraries raise over what they were sent, such as `json.JSONDecodeError`.
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
