"""Tools from plain functions, and the environment `tools`, in which a turn without a call is the last.

Keyword-only parameters of a function, and everything set in `options`, belong to the configuration and are not shown to
the model.
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
from mrl.config.agent import TOOLS, ToolConfig
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
    """A function with the schema shown to the model. `options` are arguments that the model does not set."""

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any] | None = None, name: str = "") -> None:
        self.name = name or function.__name__
        self._function = partial(function, **(options or {}))
        self.schema = tool_schema(function, self.name, options=set(options or {}))

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Return the function's result as text. Raise `ValueError` for wrong arguments."""
        if problems := list(violations(arguments, self.schema["function"]["parameters"])):
            raise ValueError(f"the call of {self.name} is wrong: {'; '.join(problems)}")
        result = self._function(**arguments)
        if inspect.isawaitable(result):
            result = await result
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)


def tool_schema(function: Callable[..., Any], name: str, options: set[str]) -> dict[str, Any]:
    """Return the schema in the usual form: name, description, and parameters as a JSON schema."""
    description, _, _ = (inspect.getdoc(function) or "").partition("\n\n")
    hints, descriptions = get_type_hints(function), dict(_described(function))
    taken = inspect.signature(function).parameters
    if unknown := options - taken.keys():
        raise AgentError(
            f"the tool has no parameter {min(unknown)}", where=f"tool {name}", fix=did_you_mean(min(unknown), taken)
        )
    for_options = {item.name for item in taken.values() if item.kind is item.KEYWORD_ONLY}
    if missing := [item for item in sorted(for_options - options) if taken[item].default is inspect.Parameter.empty]:
        needed = missing[0]
        raise AgentError(f"the tool needs the option {needed}", where=f"tool {name}", fix=f"options: {{{needed}: ...}}")
    properties = {}
    for parameter in (item for item in taken.values() if item.name not in options | for_options):
        where = f"tool {name}, parameter {parameter.name}"
        if parameter.name not in hints or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise AgentError("every parameter of a tool needs a type", where=where, fix=f"{parameter.name}: str")
        about = {"description": descriptions[parameter.name]} if parameter.name in descriptions else {}
        properties[parameter.name] = _schema_of(hints[parameter.name], where) | about
    required = [item for item in properties if taken[item].default is inspect.Parameter.empty]
    if not description:
        raise AgentError("a tool needs a description for the model", where=f"tool {name}", fix="give it a docstring")
    parameters = {"type": "object", "properties": properties, "required": required}
    return {
        "type": "function",
        "function": {"name": name, "description": " ".join(description.split()), "parameters": parameters},
    }


def violations(value: Any, schema: Mapping[str, Any], where: str = "") -> Iterator[str]:
    """Yield, in words for the model, the places where a value does not match its schema."""
    place = where or "the call"
    if "anyOf" in schema:
        by_choice = [list(violations(value, choice, where)) for choice in schema["anyOf"]]
        yield from min(by_choice, key=len) if all(by_choice) else ()
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
    """Yield parameters with their descriptions below `Args:` in the docstring."""
    names = "|".join(inspect.signature(function).parameters)
    if listed := _ARGUMENTS.search(inspect.getdoc(function) or ""):
        pieces = re.split(rf"^\s*({names})(?: \(.*?\))?:", listed[1], flags=re.MULTILINE)[1:]
        yield from ((name, " ".join(text.split())) for name, text in zip(pieces[::2], pieces[1::2], strict=True))


class ToolEnvironment(Environment):
    """Answers every call of a turn, running `async def` tools concurrently. Reward functions score the end.

    The parts `calls` and `failed_calls` count the model's calls, and the calls answered with an error: a call that
    cannot be parsed, an unknown tool, wrong arguments, or a `ValueError` of the tool.

    The kind of exception decides what happens. A `ValueError` of a tool is a mistake of the model, such as a page that
    does not exist: the model reads "error: ..." and continues. Any other exception is a failure of the tool, such as a
    service that is down or a bug: the conversation is retried or left out. This includes subclasses of `ValueError`,
    which libraries raise for data that they received, such as `json.JSONDecodeError`.
    """

    def __init__(self, tools: Mapping[str, ToolConfig], max_result_characters: int = 20_000) -> None:
        """Offer these tools. A result longer than `max_result_characters` is cut, with a note."""
        if not tools:
            raise AgentError(
                "no tool is configured", where="agent.environments", fix="tools: {calc: {name: calculator}}"
            )
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
            for task_running in running:  # if one tool has failed, the others need not continue
                task_running.cancel()

    async def _result(self, call: ToolCall, turn: Turn) -> str:
        try:
            if call.arguments is None:
                raise ValueError(call.problem)
            if call.name not in self._tools:
                raise ValueError(f"there is no tool {call.name!r:.60}; there are: {', '.join(self._tools)}")
            if not turn.left_turns:
                return "not called, for no turn is left"  # its result would never be read
            text = await self._tools[call.name].call(call.arguments)
        except ValueError as error:
            if type(error) is not ValueError:
                raise
            self._parts["failed_calls"] += 1
            text = f"error: {error}"
        num_cut = len(text) - self._max_characters
        return text if num_cut <= 0 else f"{text[: self._max_characters]}\n... ({num_cut} more characters are cut)"


def load_tool(name: str) -> Callable[..., Any]:
    """Return the built-in tool with that name, or the function at `package.module:function`."""
    if ":" not in name and name not in TOOLS:
        fix = f"{did_you_mean(name, TOOLS)} Or name your own as package.module:function."
        raise NameUnknown(f'unknown tool "{name}"', where="agent.environments", fix=fix)
    loaded = load_attribute(TOOLS.get(name, name))
    if not callable(loaded):
        raise NameUnknown(f'"{name}" is not a function', where="agent.environments")
    return loaded  # type: ignore[no-any-return]
