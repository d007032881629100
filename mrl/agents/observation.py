"""An environment's answer as token ids: in its format, cut where it is too long, and in nobody else's voice.

It is cut as text and before it is enclosed, so that what closes it stays. What it must not hold, control tokens and the
tags that enclose it, gets a space after its first character: no document is worth a conversation.

What a chat template writes between two turns of the model is the increment that follows what was written. The
observation is rendered behind a turn of one marked word, and what stands behind the end of that turn is the increment.
It begins behind the token that ends a turn, for the line break that templates put there nobody wrote. `differences`
renders whole conversations as well, and says where that is not what increments make of them.
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
    """What the model reads next, and what it lost on the way."""

    ids: Ids
    text: str
    num_cut_characters: int
    num_escaped: int


class Speaker:
    """How the model and one environment speak with each other; without a template only text that has no roles."""

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
        ends = [*form.end_tokens, *([template.end_of_turn] if template is not None else [])]
        vocabulary = tokenizer.get_vocab()
        self.end_ids = frozenset(vocabulary[token] for token in ends if token in vocabulary)
        """Tokens that end a turn."""

    def render(self, start: Start) -> tuple[str, list[int]]:
        """Return the prompt that an environment begins with, as text and as token ids."""
        if self._template is None:
            what = "the environment begins with messages of its own, and data.raw_text has no template for them"
            raise AgentError(what, where=self._where)
        text = self._template.with_tools(start.tools).render(start.messages, calls_for_answer=True)
        return text, self._tokenizer([text], add_special_tokens=False)["input_ids"][0]

    def encode(
        self, conversation: Conversation, calls: Sequence[ToolCall], observation: Observation
    ) -> EncodedObservation | None:
        """Return what follows the conversation; the end of its turn first, where the model did not write it.

        None where not a character of each text fits, which a model causes that calls too much in one turn.
        """
        named = [replace(call, name=self._harmless(call.name)) for call in calls]
        given = (*observation.results, observation.text)
        texts = [self._harmless(text) for text in given]
        has_end = int(conversation.context_ids[-1]) in self.end_ids

        @cache
        def cut_to(kept: int) -> tuple[str, Ids]:
            *results, text = [text[:kept] for text in texts]
            whole = self._text(named, replace(observation, results=results, text=text), has_end=has_end)
            return whole, np.array(self._tokenizer([whole], add_special_tokens=False)["input_ids"][0], np.int32)

        kept = self._longest(lambda kept: len(cut_to(kept)[1]) <= self._max_tokens, max(map(len, texts)))
        if kept is None:
            return None
        text, ids = cut_to(kept)
        num_cut = sum(max(0, len(whole) - kept) for whole in texts)
        before, after = [call.name for call in calls] + [*given], [call.name for call in named] + texts
        return EncodedObservation(ids, text, num_cut, sum(map(len, after)) - sum(map(len, before)))

    def _harmless(self, text: str) -> str:
        while self._forbidden.search(text):
            text = self._forbidden.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)
        return text

    def _text(self, calls: Sequence[ToolCall], observation: Observation, *, has_end: bool) -> str:
        said = answer_of(self.format, calls, observation)
        if isinstance(said, str):
            return said
        if self._template is None:
            raise AgentError("its answers are messages, and there is no chat template", where="agent.format")
        return ("" if has_end else self._template.end_of_turn) + self._template.increment(said)

    def _longest(self, fits: Callable[[int], bool], longest: int) -> int | None:
        """Return how many characters of each text may stay: all of them, or about as many as fit."""
        low, high = 1, 8 * self._max_tokens  # more characters than so many tokens usually have
        while high < longest and fits(high):  # never reads 10 MB to keep a page of them
            low, high = high, 2 * high
        if high >= longest and fits(longest):
            return longest
        high = min(high, longest)
        while low + 1 < high:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low if low > 1 or fits(low) else None


_WHERE = "the chat template"
_MARK = "mrl0mark"
_CALL_ID = "call00000"
"""Some templates demand nine letters and digits."""


class TurnTemplate:
    """The chat template of a tokenizer with the tools of an environment."""

    def __init__(
        self, tokenizer: ChatTokenizer, options: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        self._made_of = tokenizer, options
        self._template = template_of(tokenizer, {**options, "tools": list(tools)} if tools else options)
        self._control = control_tokens(tokenizer)
        marked = self._behind_mark([_QUESTION, {"role": "assistant", "content": _MARK}], _MARK, last=True)
        self.end_of_turn = marked[0]

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> TurnTemplate:
        return TurnTemplate(*self._made_of, tools)

    def render(self, messages: Sequence[Message], *, calls_for_answer: bool) -> str:
        given = [
            {"tool_call_id": _CALL_ID, **message} if message["role"] == "tool" else message for message in messages
        ]
        try:
            return self._template.render(given, calls_for_answer=calls_for_answer)
        except TemplateFailure as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise AgentError(f"it refuses messages of {roles}: {error}", where=_WHERE) from error

    def increment(self, messages: Sequence[Message]) -> str:
        """Return what follows the end of a turn up to where the next begins, of which these messages are the answer."""
        mark, texts = _MARK, str(messages)
        while mark in texts:
            mark += "x"
        turn = said(mark, calls=mark if messages[0]["role"] == "tool" else "")
        end, increment = self._behind_mark([_QUESTION, turn, *messages], mark)
        if end != self.end_of_turn:
            raise AgentError(f"a turn that calls tools ends with {end}, others with {self.end_of_turn}", where=_WHERE)
        return increment

    def _behind_mark(self, messages: Sequence[Message], mark: str, *, last: bool = False) -> tuple[str, str]:
        """Return the token that ends the turn with the mark, and what follows it."""
        text = self.render(messages, calls_for_answer=not last)
        found = self._control.search(text, text.rfind(mark)) if mark in text else None
        if found is None:
            what = "it ends no turn with a control token" if mark in text else "it leaves out what the model wrote"
            raise AgentError(what, where=_WHERE, fix="data.template_file names another, or a format without roles")
        return found[0], text[found.end() :]


def said(text: str, *, calls: str = "") -> Message:
    """Return a turn of the model, which calls a tool of that name."""
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
"""What increments are proven on; each ends where it is the model's turn."""


def differences(template: TurnTemplate, tokenizer: ChatTokenizer, messages: Sequence[Message]) -> Iterator[str]:
    """Yield where the template would show the model another conversation than one that grows by increments.

    With none, prompt, turns and increments joined are the whole conversation rendered, as text and as token ids.
    """
    turns = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    for number, (at, following) in enumerate(zip(turns, [*turns[1:], len(messages)], strict=True)):
        before = template.render(messages[:at], calls_for_answer=True)
        whole = template.render(messages[:following], calls_for_answer=True)
        increment = template.increment(messages[at + 1 : following])
        if not whole.startswith(before):
            yield f"turn {number}: what stands before it becomes another text: {_apart(before, whole)}"
        elif messages[at]["content"].strip() not in whole[len(before) :]:
            yield f"turn {number}: the template leaves out {messages[at]['content']!r:.60}, which is kept"
        if not whole.endswith(increment):
            yield f"turn {number}: its answer is another: {_apart(increment, whole[-len(increment) :])}"
        elif whole.startswith(before):
            pieces = [before, whole[len(before) : -len(increment)], increment]
            one_by_one = tokenizer(pieces, add_special_tokens=False)["input_ids"]
            if [*chain(*one_by_one)] != tokenizer([whole], add_special_tokens=False)["input_ids"][0]:
                yield f"turn {number}: its pieces are other tokens than their whole"
            if not pieces[1].endswith(template.end_of_turn):
                yield f"turn {number}: the template ends it with {pieces[1][-20:]!r}, not {template.end_of_turn!r}"


def _apart(kept: str, shown: str) -> str:
    at = next((at for at, (one, other) in enumerate(zip(kept, shown, strict=False)) if one != other), len(kept))
    return f"the conversation has {kept[at : at + 40]!r} where the template has {shown[at : at + 40]!r}"
