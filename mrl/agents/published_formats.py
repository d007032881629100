"""Formats of tool calls that DeepSeek, Kimi, GLM and Qwen3-Coder publish, with the names of vLLM's tool parsers.

DeepSeek and Kimi write control tokens around JSON; GLM and Qwen3-Coder write each value as text between tags. Answers
follow as text if a chat template cannot be asked for them: DeepSeek's templates take no arguments as objects, Kimi's
repeat the number of a call, and GLM's end no turn.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mrl.agents.environment import Message, Observation, ToolCall
from mrl.agents.formats import Format, Hermes, decode_json, made_call


class _ControlTokens(Format):
    """Calls with a control token before the header, one between header and arguments, and one after them."""

    answers_in_text = True
    _begin: str
    _between: str
    _end: str

    def parse(self, text: str) -> list[ToolCall]:
        _, thought, rest = text.rpartition("</think>")
        spoken = rest if thought else text.partition("<think>")[0]
        return [self._call(piece) for piece in spoken.split(self._begin)[1:]]

    def _call(self, piece: str) -> ToolCall:
        header, between, rest = piece.partition(self._between)
        body, end, _ = rest.partition(self._end)
        name, arguments = self._name_and_json(header.strip(), body.strip())
        if not between or not end:
            return ToolCall(name=name, problem=f"There is no {self._end if between else self._between} in the call.")
        return made_call(name, arguments)

    @abstractmethod
    def _name_and_json(self, header: str, body: str) -> tuple[str, str]:
        """Return the name of the tool, and the text of its arguments."""


class DeepSeekV31(_ControlTokens):
    """`<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`. The model calls tools without thinking."""

    turn_end = "<｜end▁of▁sentence｜>"
    _begin, _between, _end = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    _next_turn = "<｜Assistant｜></think>"

    def _name_and_json(self, header: str, body: str) -> tuple[str, str]:
        return header, body

    def answer(self, calls: Sequence[ToolCall], observation: Observation) -> list[Message] | str:
        results = [f"<｜tool▁output▁begin｜>{result}<｜tool▁output▁end｜>" for result in observation.results]
        user = f"<｜User｜>{observation.text}{self._next_turn}" if observation.text else ""
        return (self._joined(results) if results else "") + user

    def _joined(self, results: Sequence[str]) -> str:
        return "".join(results)


class DeepSeekV3(DeepSeekV31):
    """`<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME`, JSON in a block of Markdown, `<｜tool▁call▁end｜>`."""

    _next_turn = "<｜Assistant｜>"
    _block = re.compile(r"([^\n]*)\n```json\n(.*)\n```", re.DOTALL)

    def _name_and_json(self, header: str, body: str) -> tuple[str, str]:
        block = self._block.fullmatch(body)
        return (block[1].strip(), block[2]) if block else ("", body)

    def _joined(self, results: Sequence[str]) -> str:
        lines = "\n".join(results)
        return f"<｜tool▁outputs▁begin｜>{lines}<｜tool▁outputs▁end｜>"


class KimiK2(_ControlTokens):
    """`<|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>{...}<|tool_call_end|>`."""

    turn_end = "<|im_end|>"
    _begin, _between, _end = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"

    def _call(self, piece: str) -> ToolCall:
        return replace(super()._call(piece), id=piece.partition(self._between)[0].strip())

    def _name_and_json(self, header: str, body: str) -> tuple[str, str]:
        return header.removeprefix("functions.").rpartition(":")[0], body

    def answer(self, calls: Sequence[ToolCall], observation: Observation) -> list[Message] | str:
        pairs = zip(calls, observation.results, strict=True) if observation.results else ()
        texts = [
            f"<|im_system|>{call.name or 'tool'}<|im_middle|>## Return of {call.id}\n{result}<|im_end|>"
            for call, result in pairs
        ]
        if observation.text:
            texts.append(f"<|im_user|>user<|im_middle|>{observation.text}<|im_end|>")
        return "".join(texts) + "<|im_assistant|>assistant<|im_middle|>"


class _Tags(Hermes):
    """Calls in `<tool_call>`, with tags around each value. The tool's schema says which values are not text."""

    _head: re.Pattern[str]
    _value: re.Pattern[str]

    def _call(self, text: str, start: int) -> tuple[ToolCall, int]:
        head = self._head.match(text, start)
        if head is None:
            _, _, rest = text[start:].partition("</tool_call>")
            return ToolCall(name="", problem="There is no name of a tool in the call."), len(text) - len(rest)
        arguments: dict[str, Any] = {}
        at, problem = head.end(), ""
        while value := self._value.match(text, at):
            problem = problem or (f"{value[1]} occurs twice in the call." if value[1] in arguments else "")
            arguments[value[1]], at = value[2], value.end()
        if closed := self._close.match(text, at):
            call = ToolCall(name=head[1], problem=problem) if problem else made_call(head[1], arguments)
            return call, closed.end()
        _, _, rest = text[at:].partition("</tool_call>")
        what = f"The call does not end after {len(arguments)} arguments with its closing tags."
        return ToolCall(name=head[1], problem=what), len(text) - len(rest)

    def with_types(self, call: ToolCall, parameters: Mapping[str, Any]) -> ToolCall:
        if call.arguments is None:
            return call
        schemas = parameters.get("properties", {})
        typed = {name: _typed(value, schemas.get(name, {})) for name, value in call.arguments.items()}
        return made_call(call.name, typed)


class QwenCoder(_Tags):
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`, also of Qwen3.5."""

    _head = re.compile(r"\s*<function=([^>\n]+)>")
    _value = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
    _close = re.compile(r"\s*</function>\s*</tool_call>")


class Glm45(_Tags):
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`, of GLM-4.5 to 4.7."""

    answers_in_text, opens_turn = True, True
    end_tokens = ("<|observation|>", "<|user|>")
    _head = re.compile(r"\s*([^\s<]+)")
    _value = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)

    def answer(self, calls: Sequence[ToolCall], observation: Observation) -> list[Message] | str:
        results = "".join(f"\n<tool_response>\n{result}\n</tool_response>" for result in observation.results)
        user = f"<|user|>\n{observation.text}" if observation.text else ""
        return (f"<|observation|>{results}" if results else "") + user


_PYTHON_NAMES = {"True": True, "False": False, "None": None}


def _typed(text: str, schema: Mapping[str, Any]) -> Any:
    """Return a value as its schema asks for it. Text that is no such value stays text, and the tool reports it."""
    kinds = {choice.get("type") for choice in schema.get("anyOf", [schema])}
    if kinds <= {"string", None} or ("string" in kinds and text not in ("null", "None")):
        return text
    if text in _PYTHON_NAMES:
        return _PYTHON_NAMES[text]
    try:
        return decode_json(text)
    except (ValueError, RecursionError):
        return text
