"""Checks of a chat-completion request. Errors match those of OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool")
Problem = tuple[int, str]
"""HTTP status of the answer, and the problem."""


def problem_of(body: Mapping[str, Any], models: Sequence[str]) -> Problem | None:
    """Return why a request cannot be answered, or None if it can."""
    model = body.get("model")
    if not isinstance(model, str):
        return 400, f'"model" is {_kind(model)}, but must be text: {_or(models)}'
    if model not in models:
        known = f"the trained model is {_or(models)}; set options.models of the environment to rename it"
        return 404, f'the model "{model:.80}" does not exist: {known}'
    what = next(_problems(body), None)
    return None if what is None else (400, what)


def text_of(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    """Return the text of a message's content. Clients may send a list of parts."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.get("text") or part.get("refusal") or "" for part in content)


def _problems(body: Mapping[str, Any]) -> Iterator[str]:
    messages, tools = body.get("messages"), body.get("tools")
    if not isinstance(messages, list) or not messages:
        yield f'"messages" is {_kind(messages)}, but must be a list of messages'
        return
    for at, message in enumerate(messages):
        yield from (f"messages[{at}]{problem}" for problem in _of_message(message))
    if tools is not None and not (isinstance(tools, list) and all(_names_function(tool) for tool in tools)):
        yield '"tools" must be a list of {"type": "function", "function": {"name": "..."}}'
    try:
        json.dumps([messages, tools], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        yield "half of a surrogate pair is not valid text"
    except RecursionError:
        yield "the messages or tools are nested too deeply"


def _of_message(message: Any) -> Iterator[str]:
    if not isinstance(message, Mapping):
        yield f" is {_kind(message)}, but must be a message with a role"
        return
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
    if not isinstance(role, str) or role not in ROLES:
        shown = f'"{role:.40}"' if isinstance(role, str) else _kind(role)
        yield f".role is {shown}, but must be one of {', '.join(ROLES)}"
    if isinstance(content, list):
        for number, part in enumerate(content):
            if not isinstance(part, Mapping) or not isinstance(part.get("text", part.get("refusal")), str):
                yield f".content[{number}] has no text, and the model reads only text"
    elif not isinstance(content, str | None):
        yield f".content is {_kind(content)}, but must be text or a list of parts with text"
    if calls is not None and not isinstance(calls, list):
        yield f".tool_calls is {_kind(calls)}, but must be a list of calls"
    for number, call in enumerate(calls if isinstance(calls, list) else ()):
        if not _names_function(call) or not isinstance(call.get("id"), str):
            yield f'.tool_calls[{number}] must be {{"id": "...", "function": {{"name": "...", "arguments": "..."}}}}'
    if not isinstance(message.get("tool_call_id"), str | None):
        yield f".tool_call_id is {_kind(message['tool_call_id'])}, but must be text"


def _names_function(value: Any) -> bool:
    function = value.get("function") if isinstance(value, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _kind(value: Any) -> str:
    """Return the name of a value's type in JSON."""
    kinds = {type(None): "missing", bool: "a boolean", int: "a number", float: "a number", str: "text", list: "a list"}
    return "an empty list" if value == [] else kinds.get(type(value), "an object")


def _or(names: Sequence[str]) -> str:
    return " or ".join(f'"{name}"' for name in names)
