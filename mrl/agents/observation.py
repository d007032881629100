"""An environment's answer as token ids: in its format, cut where it is too long, and in nobody else's voice.

It is cut as text and before it is enclosed, so that what closes it stays. What it must not hold, control tokens and the
tags that enclose it, gets a space after its first character: no document is worth a conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from mrl.agents.conversation import Conversation, Ids
from mrl.agents.environment import Observation, ToolCall
from mrl.agents.formats import Format, answer_of
from mrl.agents.template import TurnTemplate
from mrl.data.chat import ChatTokenizer, control_tokens
from mrl.errors import AgentError


@dataclass(frozen=True, eq=False)
class EncodedObservation:
    """What the model reads next, and what it lost on the way."""

    ids: Ids
    text: str
    num_cut_characters: int
    num_escaped: int


class ObservationEncoder:
    """Encode what environments of one format answer; without a template only text that has no roles."""

    def __init__(
        self, tokenizer: ChatTokenizer, form: Format, template: TurnTemplate | None, *, max_tokens: int
    ) -> None:
        self._tokenizer, self._form, self._template, self._max_tokens = tokenizer, form, template, max_tokens
        self._forbidden = control_tokens(tokenizer, *form.reserved)
        ends = [*form.end_tokens, *([template.end_of_turn] if template is not None else [])]
        vocabulary = tokenizer.get_vocab()
        self.end_ids = frozenset(vocabulary[token] for token in ends if token in vocabulary)
        """Tokens that end a turn."""

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
        """Return the text with a space in each token and tag that must not stand in it."""
        while self._forbidden.search(text):
            text = self._forbidden.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)
        return text

    def _text(self, calls: Sequence[ToolCall], observation: Observation, *, has_end: bool) -> str:
        said = answer_of(self._form, calls, observation)
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
