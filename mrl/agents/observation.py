"""An environment's answer as token ids: in the agreed format, cut to length, and with control tokens escaped.

Text is cut before it is enclosed, so that the closing tags stay. Control tokens and the enclosing tags inside the text
get a space after their first character, so that a document cannot break the conversation.

The increment is the text that a chat template writes between two turns of the model. The observation is rendered after
a turn that consists of one marker word, and the text after the end of that turn is the increment. It begins after the
token that ends a turn, because the model does not write the line break that templates add there. `differences` renders
whole conversations too, and reports where they differ from the joined increments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import Any

import numpy as np

from mrl.agents.conversation import Conversation, Ids
from mrl.agents.environment import Message, Observation, Start, ToolCall
from mrl.agents.formats import Format, answer_of
from mrl.data.chat import ChatTokenizer, control_tokens, template_of
from mrl.data.chat_template import TemplateFailure
from mrl.errors import AgentError


@dataclass(frozen=True, eq=False)
class EncodedObservation:
    """Text and tokens that the model reads next, and what was cut or escaped."""

    ids: Ids
    text: str
    num_cut_characters: int
    num_escaped: int


class Speaker:
    """The exchange between the model and one environment. Without a template, only text without roles is possible."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        form: Format,
        template: TurnTemplate | None,
        *,
        max_tokens: int,
        max_prompt_tokens: int = 0,
        where: str = "",
    ) -> None:
        """Encode at most `max_tokens` of an observation."""
        self._tokenizer, self.format, self._template, self._max_tokens = tokenizer, form, template, max_tokens
        self.max_prompt_tokens, self._where = max_prompt_tokens, where
        self._forbidden = control_tokens(tokenizer, *form.reserved)
        if template is not None and not template.end_of_turn and not form.answers_in_text:
            raise AgentError(_NO_END, where=_WHERE, fix=_NO_END_FIX)
        ends = [*form.end_tokens, *([template.end_of_turn] if template is not None else [])]
        vocabulary = tokenizer.get_vocab()
        self._ends = {vocabulary[token]: token for token in ends if token in vocabulary}
        self.end_ids = frozenset(self._ends)
        """Tokens that end a turn."""

    def render(self, start: Start) -> tuple[str, list[int]]:
        """Return the prompt that an environment begins with, as text and as token ids."""
        if self._template is None:
            what = "the environment begins with its own messages, but data.raw_text has no template for them"
            raise AgentError(what, where=self._where)
        text = self._template.with_tools(start.tools).render(start.messages, calls_for_answer=True)
        return text, self._tokenizer([text], add_special_tokens=False)["input_ids"][0]

    def encode(
        self, conversation: Conversation, calls: Sequence[ToolCall], observation: Observation
    ) -> EncodedObservation | None:
        """Return the continuation of the conversation, beginning with the end of its turn if the model did not write
        it.

        Return None if not even one character of each text fits, which happens if the model makes too many calls in a
        turn.
        """
        safe_calls = [replace(call, name=self._harmless(call.name), id=self._harmless(call.id)) for call in calls]
        raw_texts = (*observation.results, observation.text)
        texts = [self._harmless(text) for text in raw_texts]
        end = self._ends.get(int(conversation.context_ids[-1]))

        @cache
        def cut_to(kept: int) -> tuple[str, Ids]:
            *results, text = [text[:kept] for text in texts]
            whole = self._text(safe_calls, replace(observation, results=results, text=text), end)
            return whole, np.array(self._tokenizer([whole], add_special_tokens=False)["input_ids"][0], np.int32)

        kept = self._longest(lambda kept: len(cut_to(kept)[1]) <= self._max_tokens, max(map(len, texts)))
        if kept is None:
            return None
        text, ids = cut_to(kept)
        num_cut = sum(max(0, len(whole) - kept) for whole in texts)
        raw_strings, safe_strings = (
            [call.name for call in calls] + [*raw_texts],
            [call.name for call in safe_calls] + texts,
        )
        return EncodedObservation(ids, text, num_cut, sum(map(len, safe_strings)) - sum(map(len, raw_strings)))

    def _harmless(self, text: str) -> str:
        while self._forbidden.search(text):
            text = self._forbidden.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)
        return text

    def _text(self, calls: Sequence[ToolCall], observation: Observation, end: str | None) -> str:
        """Return the answer to a turn that ended with this token, or with none."""
        answer = answer_of(self.format, calls, observation)
        if isinstance(answer, str):
            # Some models end their turn with the token of the next speaker.
            following = self.format.turn_end + answer if end is None else answer.removeprefix(end)
            return following + (self._template.opening if self.format.opens_turn and self._template else "")
        if self._template is None:
            raise AgentError("its answers are chat messages, but there is no chat template", where="agent.format")
        return (self._template.end_of_turn if end is None else "") + self._template.increment(answer)

    def _longest(self, fits: Callable[[int], bool], longest: int) -> int | None:
        """Return how many characters of each text to keep: all, or about as many as fit."""
        low, high = 1, 8 * self._max_tokens  # usually more characters than this many tokens have
        while high < longest and fits(high):  # avoid encoding 10 MB to keep a page
            low, high = high, 2 * high
        if high >= longest and fits(longest):
            return longest
        high = min(high, longest)
        while low + 1 < high:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low if low > 1 or fits(low) else None


_WHERE = "the chat template"
_NO_END = "it does not end a turn with a control token"
_NO_END_FIX = "set data.template_file, or a format without roles"
_MARK = "mrl0mark"
_CALL_ID = "call00000"
"""Some templates require nine letters and digits."""


class TurnTemplate:
    """The chat template of a tokenizer, with the tools of an environment."""

    def __init__(
        self, tokenizer: ChatTokenizer, options: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        self._made_of = tokenizer, options
        self._template = template_of(tokenizer, {**options, "tools": list(tools)} if tools else options)
        self._control = control_tokens(tokenizer)
        ended = self._behind_mark([_QUESTION, {"role": "assistant", "content": _MARK}], _MARK, last=True)
        self.end_of_turn = ended[0]
        """The token that ends the model's turn, or nothing."""

    @property
    def opening(self) -> str:
        """The text with which a turn of the model opens."""
        whole = self.render([_QUESTION], calls_for_answer=True)
        return whole.removeprefix(self.render([_QUESTION], calls_for_answer=False))

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> TurnTemplate:
        return TurnTemplate(*self._made_of, tools)

    def render(self, messages: Sequence[Message], *, calls_for_answer: bool) -> str:
        prepared = [
            {"tool_call_id": _CALL_ID, **message} if message["role"] == "tool" else message for message in messages
        ]
        try:
            return self._template.render(prepared, calls_for_answer=calls_for_answer)
        except TemplateFailure as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise AgentError(f"it raised an error on messages with the roles {roles}: {error}", where=_WHERE) from error

    def increment(self, messages: Sequence[Message]) -> str:
        """Return the text from the end of a turn to the beginning of the next, with these messages as the answer."""
        mark, texts = _MARK, str(messages)
        while mark in texts:
            mark += "x"
        turn = said(mark, calls=mark if messages[0]["role"] == "tool" else "")
        end, increment = self._behind_mark([_QUESTION, turn, *messages], mark)
        if not end:
            raise AgentError(_NO_END, where=_WHERE, fix=_NO_END_FIX)
        if end != self.end_of_turn:
            raise AgentError(
                f"a turn with tool calls ends with {end}, but other turns with {self.end_of_turn}", where=_WHERE
            )
        return increment

    def _behind_mark(self, messages: Sequence[Message], mark: str, *, last: bool = False) -> tuple[str, str]:
        """Return the token that ends the turn with the marker, or nothing, and the text after it."""
        text = self.render(messages, calls_for_answer=not last)
        if mark not in text:
            raise AgentError("it leaves out the model's text", where=_WHERE, fix=_NO_END_FIX)
        match = self._control.search(text, text.rfind(mark))
        return (match[0], text[match.end() :]) if match else ("", "")


def said(text: str, *, calls: str = "") -> Message:
    """Return a turn of the model, with a call of the tool `calls` if given."""
    call = {"type": "function", "id": _CALL_ID, "function": {"name": calls, "arguments": {}}}
    return {"role": "assistant", "content": text} | ({"tool_calls": [call]} if calls else {})


_QUESTION: Message = {"role": "user", "content": "Which?"}
_RESULT: Message = {"role": "tool", "name": "look", "content": "It is 3."}
_THOUGHT = "<think>\nI look.\n</think>\n\n"
CONVERSATIONS: dict[str, list[Message]] = {
    "results of tools": [_QUESTION, said("", calls="look"), _RESULT, said("", calls="look"), _RESULT, _RESULT],
    "answers of a user": [_QUESTION, said("It is 3."), _QUESTION, said("Or 4."), _QUESTION],
    "a user after a tool": [_QUESTION, said("", calls="look"), _RESULT, _QUESTION],
    "thoughts before tools": [_QUESTION, said(_THOUGHT, calls="look"), _RESULT, said(_THOUGHT, calls="look"), _RESULT],
    "thoughts before a user": [_QUESTION, said(f"{_THOUGHT}It is 3."), _QUESTION],
}
"""Conversations on which increments are tested. Each ends before the model's turn."""


def differences(template: TurnTemplate, tokenizer: ChatTokenizer, messages: Sequence[Message]) -> Iterator[str]:
    """Yield differences between what the template shows the model and the conversation that grows by increments.

    Without differences, the joined prompt, turns and increments equal the whole rendered conversation, as text and as
    ids.
    """
    turns = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    for number, (at, following) in enumerate(zip(turns, [*turns[1:], len(messages)], strict=True)):
        prefix = template.render(messages[:at], calls_for_answer=True)
        whole = template.render(messages[:following], calls_for_answer=True)
        increment = template.increment(messages[at + 1 : following])
        if not whole.startswith(prefix):
            yield f"turn {number}: the text before it changes: {_apart(prefix, whole)}"
        elif messages[at]["content"].strip() not in whole[len(prefix) :]:
            yield f"turn {number}: the template leaves out {messages[at]['content']!r:.60}, which it keeps"
        if not whole.endswith(increment):
            yield f"turn {number}: its answer differs: {_apart(increment, whole[-len(increment) :])}"
        elif whole.startswith(prefix):
            pieces = [prefix, whole[len(prefix) : -len(increment)], increment]
            one_by_one = tokenizer(pieces, add_special_tokens=False)["input_ids"]
            if [*chain(*one_by_one)] != tokenizer([whole], add_special_tokens=False)["input_ids"][0]:
                yield f"turn {number}: its pieces have other tokens than the whole"
            if not pieces[1].endswith(template.end_of_turn):
                yield f"turn {number}: the template ends it with {pieces[1][-20:]!r}, not {template.end_of_turn!r}"


def _apart(kept: str, shown: str) -> str:
    at = next((at for at, (one, other) in enumerate(zip(kept, shown, strict=False)) if one != other), len(kept))
    return f"the conversation has {kept[at : at + 40]!r}, but the template has {shown[at : at + 40]!r}"
