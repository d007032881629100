"""How a model calls tools in its text, and how it is told what came of them.

What a model writes is never an error here: a call that cannot be read is a call with a problem, in words for the model.
Nothing is mended either, for half a call that is made whole is another call than the model would have made.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

from mrl.agents.environment import Message, Observation, ToolCall
from mrl.errors import AgentError
from mrl.registry import Registry

FORMATS: Registry[type[Format]] = Registry("format")
_MAX_DEPTH = 32
CUT_OFF = "The turn reached its limit of tokens before it was complete, and none of its calls was executed."
INVALID_ACTION = (
    "My previous action is invalid. If I want to search, I should put the query between <search> and </search>. If I "
    "want to give the final answer, I should put the answer between <answer> and </answer>. Let me try again."
)


class Format(ABC):
    """One way of calling tools; one of yours is named as `package.module:Class` and made without arguments."""

    stops: tuple[str, ...] = ()
    """Texts that end a turn, which they belong to."""
    end_tokens: tuple[str, ...] = ()
    """Tokens that end a turn beside the template's own, where the tokenizer has them."""
    reserved: tuple[str, ...] = ()
    """What encloses an observation, and must not stand in one: a document would speak as something else."""

    @abstractmethod
    def parse(self, text: str) -> list[ToolCall]:
        """Return the calls of a turn in their order; what is wrong with one stands in it."""

    def answer(self, calls: Sequence[ToolCall], observation: Observation) -> list[Message] | str:
        """Return what the model reads next: messages for the chat template, or text that follows its own as it is."""
        pairs = zip(calls, observation.results, strict=True) if observation.results else ()
        messages: list[Message] = [{"role": "tool", "name": call.name, "content": result} for call, result in pairs]
        return [*messages, {"role": "user", "content": observation.text}] if observation.text else messages


def load_format(name: str) -> Format:
    """Return the format of that name, or of the class at `package.module:Class`."""
    found: object = FORMATS.resolve(name)
    if not isinstance(found, type) or not issubclass(found, Format):
        raise AgentError(f"{name} is no format", where="agent.format", fix="a class that inherits from Format")
    return found()


def calls_of(form: Format, text: str, finish: str) -> list[ToolCall]:
    """Return the calls of a turn, of which none may be executed if the turn was cut off."""
    calls = form.parse(text)
    if finish == "length":
        return [replace(call, arguments=None, problem=CUT_OFF) for call in calls]
    return calls


def answer_of(form: Format, calls: Sequence[ToolCall], observation: Observation) -> list[Message] | str:
    """Return what the model reads next, where every call has its result, or none has."""
    if observation.results and len(observation.results) != len(calls):
        what = f"the environment has {len(observation.results)} results for {len(calls)} calls"
        raise AgentError(what, fix="Observation(results=...) has one text for each of Turn.calls, in their order")
    return form.answer(calls, observation)


@FORMATS.register("hermes")
class Hermes(Format):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Qwen 2.5, Qwen 3 and Hermes write it."""

    reserved = ("<tool_response>", "</tool_response>")
    _mark = re.compile(r"<think>|</think>|<tool_call>")
    _close = re.compile(r"\s*</tool_call>")

    def parse(self, text: str) -> list[ToolCall]:
        calls: list[ToolCall] = []
        at = 0
        while mark := self._mark.search(text, at):
            at = mark.end()
            if mark[0] == "<think>":
                _, closed, rest = text[at:].partition("</think>")
                at = len(text) - len(rest) if closed else len(text)
            elif mark[0] == "</think>":
                calls.clear()  # the prompt had begun the thinking, and these were thoughts
            else:
                call, at = self._call(text, at)
                calls.append(call)
        return calls

    def _call(self, text: str, start: int) -> tuple[ToolCall, int]:
        call, end = _decoded(text, start, ("arguments",))
        if closed := self._close.match(text, end):
            return call, closed.end()
        _, _, rest = text[end:].partition("</tool_call>")
        missing = "There is no </tool_call> behind the call."
        return replace(call, arguments=None, problem=call.problem or missing), len(text) - len(rest)


@FORMATS.register("llama3_json")
class Llama3Json(Format):
    """`{"name": ..., "parameters": {...}}` and nothing before it, as Llama 3.1 writes it; several are parted by `;`."""

    end_tokens = ("<|eom_id|>",)
    _begin = re.compile(r'\s*(<\|python_tag\|>\s*|(?=\{\s*"(name|type|parameters)"\s*:))')
    _next = re.compile(r"\s*;\s*(?=[^\s<])")

    def parse(self, text: str) -> list[ToolCall]:
        calls: list[ToolCall] = []
        mark = self._begin.match(text)
        while mark:
            call, end = _decoded(text, mark.end(), ("parameters", "arguments"))
            calls.append(call)
            mark = None if call.problem else self._next.match(text, end)
        return calls


@FORMATS.register("search_r1")
class SearchR1Tags(Format):
    """`<search>query</search>` or `<answer>text</answer>`, whichever comes first; results follow without roles."""

    stops = ("</search>", "</answer>")
    reserved = ("<information>", "</information>")
    _action = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)

    def parse(self, text: str) -> list[ToolCall]:
        action = self._action.search(text)
        if action is None or any(tag in text for tag in self.reserved):
            return [ToolCall(name="", problem=INVALID_ACTION)]
        key = {"search": "query", "answer": "answer"}[action[1]]
        return [ToolCall(name=action[1], arguments={key: action[2].strip()})]

    def answer(self, calls: Sequence[ToolCall], observation: Observation) -> list[Message] | str:
        pairs = zip(calls, observation.results, strict=True) if observation.results else ()
        texts = [
            f"\n{result}\n" if call.problem else f"\n\n<information>{result.strip()}</information>\n\n"
            for call, result in pairs
        ]
        return "".join(texts) + observation.text


def search_r1_documents(contents: Sequence[str]) -> str:
    """Return what a search found as Search-R1 shows it; the first line of a passage is its title."""
    parts = [content.partition("\n") for content in contents]
    return "".join(f"Doc {number}(Title: {title}) {text}\n" for number, (title, _, text) in enumerate(parts, 1))


def _decoded(text: str, start: int, keys: Sequence[str]) -> tuple[ToolCall, int]:
    """Return the call that begins there, and where it ends; one with a problem where it begins."""
    start += len(text[start:]) - len(text[start:].lstrip())
    try:
        value, end = _JSON.raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        return ToolCall(name="", problem=_not_json(error, start)), start
    call = _call_of(value, keys)
    return call, start if call.problem else end


def _call_of(value: Any, keys: Sequence[str]) -> ToolCall:
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        return ToolCall(name="", problem='A call is a JSON object with the "name" of a tool.')
    given = next((value[key] for key in keys if key in value), None)
    if isinstance(given, str):
        try:
            given = _JSON.decode(given)
        except (ValueError, RecursionError) as error:
            return ToolCall(name=name, problem=_not_json(error, 0))
    if not isinstance(given, dict):
        return ToolCall(name=name, problem=f'The call has no "{keys[0]}" that are a JSON object.')
    if _is_deeper(given, _MAX_DEPTH):
        return ToolCall(name=name, problem=f"The call nests more than {_MAX_DEPTH} objects and lists.")
    try:
        json.dumps([name, given], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return ToolCall(name="", problem="The call holds half of a character.")
    return ToolCall(name=name, arguments=given)


def _is_deeper(value: Any, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(levels == 0 or _is_deeper(one, levels - 1) for one in inner)


def _not_json(error: Exception, start: int) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"The call is not valid JSON: {error.msg} at character {max(error.pos - start, 0)}."
    return f"The call is not valid JSON: {'it is nested too deeply' if isinstance(error, RecursionError) else error}."


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a key stands twice in an object")
    return found


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


_JSON = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_no_number)
