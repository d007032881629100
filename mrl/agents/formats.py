"""Formats of tool calls in a model's text, and of the answers to them.

Text of the model never raises an error here: a call that cannot be parsed becomes a call with a problem, worded for the
model. Calls are not repaired, because a completed half of a call is not the call that the model would have made.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from mrl.agents.environment import Message, Observation, ToolCall
from mrl.config.agent import FORMATS
from mrl.errors import AgentError, NameUnknown, did_you_mean
from mrl.registry import load_attribute

_MAX_DEPTH = 32
CUT_OFF = "The turn reached its limit of tokens before it was complete, and none of its calls was executed."
INVALID_ACTION = (
    "My previous action is invalid. If I want to search, I should put the query between <search> and </search>. If I "
    "want to give the final answer, I should put the answer between <answer> and </answer>. Let me try again."
)


class Format(ABC):
    """A way of calling tools. Your own is given as `package.module:Class` and created without arguments."""

    stops: tuple[str, ...] = ()
    """Texts that end a turn and are part of it."""
    end_tokens: tuple[str, ...] = ()
    """Tokens that end a turn, in addition to the template's, if the tokenizer has them."""
    answers_in_text: bool = False
    """Whether answers are plain text, so that the chat template has no part in them."""
    turn_end: str = ""
    """Text that ends a turn for the model, if an answer in plain text follows a turn that was cut off."""
    opens_turn: bool = False
    """Whether the text with which the chat template opens a turn follows an answer in plain text."""
    reserved: tuple[str, ...] = ()
    """Texts that enclose an observation and must not occur inside one: a document could otherwise pose as another
    speaker."""

    @abstractmethod
    def parse(self, text: str) -> list[ToolCall]:
        """Return the calls of a turn, in their order. Each contains its own problem, if any."""

    def with_types(self, call: ToolCall, parameters: Mapping[str, Any]) -> ToolCall:
        """Return the call with values as the schema of its parameters asks for them, if the model writes only text."""
        return call

    def answer(self, calls: Sequence[ToolCall], observation: Observation) -> list[Message] | str:
        """Return what the model reads next: messages for the chat template, or plain text that follows its turn."""
        pairs = zip(calls, observation.results, strict=True) if observation.results else ()
        messages: list[Message] = [{"role": "tool", "name": call.name, "content": result} for call, result in pairs]
        return [*messages, {"role": "user", "content": observation.text}] if observation.text else messages


def load_format(name: str) -> Format:
    """Return the format with that name, or the class at `package.module:Class`."""
    if ":" not in name and name not in FORMATS:
        fix = f"{did_you_mean(name, FORMATS)} Or name your own as package.module:Class."
        raise NameUnknown(f'unknown format "{name}"', where="agent.format", fix=fix)
    loaded: object = load_attribute(FORMATS.get(name, name))
    if not isinstance(loaded, type) or not issubclass(loaded, Format):
        raise AgentError(f"{name} is not a format", where="agent.format", fix="use a class that inherits from Format")
    return loaded()


def calls_of(form: Format, text: str, finish: str, tools: Sequence[Mapping[str, Any]] = ()) -> list[ToolCall]:
    """Return the calls of a turn, for tools with these schemas. If the turn was cut off, none may be executed."""
    functions = [tool.get("function", tool) for tool in tools]
    parameters = {function.get("name"): function.get("parameters", {}) for function in functions}
    calls = [form.with_types(call, parameters.get(call.name, {})) for call in form.parse(text)]
    if finish == "length":
        return [replace(call, arguments=None, problem=CUT_OFF) for call in calls]
    return calls


def answer_of(form: Format, calls: Sequence[ToolCall], observation: Observation) -> list[Message] | str:
    """Return what the model reads next. Either every call has a result, or none has."""
    if observation.results and len(observation.results) != len(calls):
        what = f"the environment has {len(observation.results)} results for {len(calls)} calls"
        raise AgentError(what, fix="set Observation(results=...) to one text for each of Turn.calls, in their order")
    return form.answer(calls, observation)


class Hermes(Format):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, the format of Qwen 2.5, Qwen 3 and Hermes."""

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
                calls.clear()  # the prompt had opened the thinking, so these were thoughts
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


class Llama3Json(Format):
    """`{"name": ..., "parameters": {...}}` with nothing before it, the format of Llama 3.1. Several calls are separated
    by `;`."""

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


class Harmony(Format):
    """`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`, the format of gpt-oss.

    A turn has several messages, such as thoughts before a call. The answer is written as text, because the chat
    template ends the turns of a conversation with other tokens than the model.
    """

    end_tokens = ("<|call|>", "<|return|>")
    answers_in_text = True
    turn_end = "<|end|>"
    _ends = re.compile(r"<\|(?:start|end|call|return)\|>")
    _recipient = re.compile(r"\bto=([^\s<]+)")
    _prefix = "functions."

    def parse(self, text: str) -> list[ToolCall]:
        calls: list[ToolCall] = []
        for message in self._ends.split(text):
            header, begun, content = message.partition("<|message|>")
            recipient = self._recipient.search(header) if "<|channel|>" in header else None
            if recipient is not None:
                calls.append(self._call(recipient[1], content if begun else None))
        return calls

    def _call(self, recipient: str, content: str | None) -> ToolCall:
        name = recipient.removeprefix(self._prefix)
        if not name or name == recipient:
            return ToolCall(name="", problem=f"A call is addressed to={self._prefix}NAME, with the name of a tool.")
        if content is None:
            return ToolCall(name=name, problem="There is no <|message|> before the arguments of the call.")
        return made_call(name, content)

    def answer(self, calls: Sequence[ToolCall], observation: Observation) -> list[Message] | str:
        pairs = zip(calls, observation.results, strict=True) if observation.results else ()
        texts = [
            f"<|start|>{self._prefix}{call.name or 'unknown'} to=assistant"
            f"<|channel|>commentary<|message|>{result}<|end|>"
            for call, result in pairs
        ]
        if observation.text:
            texts.append(f"<|start|>user<|message|>{observation.text}<|end|>")
        return "".join(texts) + "<|start|>assistant"


class SearchR1Tags(Format):
    """`<search>query</search>` or `<answer>text</answer>`, the first of which counts. Results follow without roles."""

    stops = ("</search>", "</answer>")
    answers_in_text = True
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
    """Return search results in Search-R1's format. The first line of a passage is its title."""
    parts = [content.partition("\n") for content in contents]
    return "".join(f"Doc {number}(Title: {title}) {text}\n" for number, (title, _, text) in enumerate(parts, 1))


def _decoded(text: str, start: int, keys: Sequence[str]) -> tuple[ToolCall, int]:
    """Return the call that begins at `start`, and its end. For a call with a problem, return its start instead."""
    start += len(text[start:]) - len(text[start:].lstrip())
    try:
        value, end = _JSON.raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        return ToolCall(name="", problem=_not_json(error, start)), start
    call = _call_of(value, keys)
    return call, start if call.problem else end


def made_call(name: str, arguments: Any) -> ToolCall:
    """Return the call of a tool with these arguments, an object or its JSON."""
    return _call_of({"name": name, "arguments": arguments}, ("arguments",))


def decode_json(text: str) -> Any:
    """Return the value of a text. Raise `ValueError` for a number that is none, and for a key that occurs twice."""
    return _JSON.decode(text)


def _call_of(value: Any, keys: Sequence[str]) -> ToolCall:
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        return ToolCall(name="", problem='A call is a JSON object with the "name" of a tool.')
    raw_arguments = next((value[key] for key in keys if key in value), None)
    if isinstance(raw_arguments, str):
        try:
            raw_arguments = _JSON.decode(raw_arguments)
        except (ValueError, RecursionError) as error:
            return ToolCall(name=name, problem=_not_json(error, 0))
    if not isinstance(raw_arguments, dict):
        return ToolCall(name=name, problem=f'The call has no "{keys[0]}" that are a JSON object.')
    if _is_deeper(raw_arguments, _MAX_DEPTH):
        return ToolCall(name=name, problem=f"The call nests more than {_MAX_DEPTH} objects and lists.")
    try:
        json.dumps([name, raw_arguments], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return ToolCall(name="", problem="The call holds half of a character.")
    return ToolCall(name=name, arguments=raw_arguments)


def _is_deeper(value: Any, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(levels == 0 or _is_deeper(item, levels - 1) for item in inner)


def _not_json(error: Exception, start: int) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"The call is not valid JSON: {error.msg} at character {max(error.pos - start, 0)}."
    return f"The call is not valid JSON: {'it is nested too deeply' if isinstance(error, RecursionError) else error}."


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(values := dict(pairs)) < len(pairs):
        raise ValueError("a key occurs twice in an object")
    return values


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


_JSON = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_no_number)
