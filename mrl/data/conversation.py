"""Conversations to tokens: prompts, the tokens of the assistant's turns, and responses for another model.

A turn of the assistant begins where the template calls for it: after the rendered text of the earlier messages, which
must appear unchanged in the whole conversation. It ends with the next control token, which the model learns to write;
text that the template adds after that (a line break) belongs to no turn. A template that renders earlier turns
differently from how the model read or wrote them (it drops their thinking) would train on text that never occurs, so
such a row is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from mrl.config.data import DataConfig
from mrl.data.chat import ChatTokenizer, control_tokens, load_tokenizer, template_of, template_options
from mrl.data.chat_template import ChatTemplate, TemplateFailure
from mrl.data.rows import Message, PromptRow
from mrl.errors import BadRow, DataError

_FIX = "set batch.loss_on=last, options in data.template, or a template that keeps it in data.template_file"


@dataclass(frozen=True)
class Continuation:
    """The tokens that follow a prompt in a conversation."""

    ids: list[int]
    is_learned: list[bool]
    """Whether the assistant writes the token, so that the loss counts it."""


class PromptEncoder:
    """Renders prompts with the chat template, or uses their text unchanged, and encodes them and what follows."""

    def __init__(
        self, tokenizer: ChatTokenizer, template_options: Mapping[str, Any], *, raw_text: bool = False
    ) -> None:
        self._tokenizer, self._raw_text = tokenizer, raw_text
        self._options = dict(template_options)
        self._control = control_tokens(tokenizer)

    def has_control_token(self, text: str) -> bool:
        return self._control.search(text) is not None

    def render(self, row: PromptRow) -> str:
        """Return the prompt as the model reads it, up to the start of its answer."""
        for index, message in enumerate((*row.messages, *row.said)):
            if match := self._control.search(message["content"]):
                what = f'message {index} ({message["role"]}) contains the control token "{match[0]}"'
                raise BadRow(what, where=row.where, fix="remove it: it would speak in another role")
        if self._raw_text:
            if len(row.messages) == 1 and row.messages[0]["role"] == "user":
                return row.messages[0]["content"]
            what = f"a raw prompt must be one text, but this is a chat of {len(row.messages)} messages"
            raise BadRow(what, where=row.where, fix="set data.raw_text=false, or columns.prompt to a text column")
        return self._applied(row.messages, row.where, calls_for_answer=True)

    @cached_property
    def _template(self) -> ChatTemplate:
        return template_of(self._tokenizer, self._options)

    def _applied(self, messages: Sequence[Message], where: str, *, calls_for_answer: bool) -> str:
        try:
            return self._template.render(messages, calls_for_answer=calls_for_answer)
        except TemplateFailure as error:
            what = f"the chat template raised an error on this prompt: {error}"
            raise BadRow(
                what, where=where, fix="correct the row, or the template's options in data.template"
            ) from error

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return token ids of rendered prompts. A template has already written all special tokens."""
        return self._tokenizer(list(texts), add_special_tokens=self._raw_text)["input_ids"] if texts else []

    def answer(self, row: PromptRow, prompt: str, prompt_ids: list[int]) -> Continuation:
        """Return the tokens from the rendered prompt to the end of the last turn, and which of them are learned."""
        if self._raw_text:
            (ids,) = self._tokenizer([row.said[0]["content"]], add_special_tokens=False)["input_ids"]
            assert self._tokenizer.eos_token_id is not None, "load_tokenizer requires an end token"
            return Continuation([*ids, self._tokenizer.eos_token_id], [True] * (len(ids) + 1))
        messages = [*row.messages, *row.said]
        whole = self._applied(messages, row.where, calls_for_answer=False)
        places = range(len(row.messages), len(messages))
        turns = {at: self._turn(messages, at, whole, row) for at in places if messages[at]["role"] == "assistant"}
        tokens = self._with_places(whole)
        num_before = sum(end <= len(prompt) for _, (_, end) in tokens)
        is_same = [token for token, _ in tokens[:num_before]] == prompt_ids
        for at, (start, _) in turns.items():
            if not is_same or any(begin < start < end for _, (begin, end) in tokens):
                what = f"message {at} (assistant) begins inside a token that also covers the text before it"
                raise BadRow(what, where=row.where, fix="remove line breaks and spaces at its beginning")
        last = max(end for _, end in turns.values())
        spans = [(token, place) for token, place in tokens[num_before:] if place[1] <= last]
        is_learned = [any(a <= begin and end <= b for a, b in turns.values()) for _, (begin, end) in spans]
        return Continuation([token for token, _ in spans], is_learned)

    def _turn(self, messages: Sequence[Message], at: int, whole: str, row: PromptRow) -> tuple[int, int]:
        """Return the start and end of a turn in the whole text."""
        prefix = self._applied(messages[:at], row.where, calls_for_answer=True)
        what = f"message {at} (assistant): the chat template"
        if not whole.startswith(prefix):
            what += " renders the messages before it differently than when it called for this answer"
            raise BadRow(what, where=row.where, fix=_FIX)
        end = self._control.search(whole, len(prefix))
        if end is None:
            raise BadRow(
                f"{what} does not end it with a control token", where=row.where, fix="use another data.template_file"
            )
        # Templates trim and add line breaks, but keep the other characters.
        if "".join(messages[at]["content"].split()) not in "".join(whole[len(prefix) : end.end()].split()):
            raise BadRow(f"{what} leaves out a part of it, such as its thinking", where=row.where, fix=_FIX)
        return len(prefix), end.end()

    def _with_places(self, text: str) -> list[tuple[int, tuple[int, int]]]:
        """Return the tokens of a text, with the start and end of their characters."""
        try:
            encoded = self._tokenizer([text], add_special_tokens=False, return_offsets_mapping=True)
        except NotImplementedError as error:
            what = "the tokenizer does not report the characters of each token"
            raise DataError(what, where="model.path", fix="save it as tokenizer.json") from error
        return list(zip(encoded["input_ids"][0], encoded["offset_mapping"][0], strict=True))


def prompt_encoder(tokenizer: ChatTokenizer, data: DataConfig) -> PromptEncoder:
    """Return an encoder of prompts for this configuration."""
    return PromptEncoder(tokenizer, template_options(data), raw_text=data.raw_text)


class ResponseEncoder:
    """Encodes a policy's samples for a model with another tokenizer: their text, in its tokens and template.

    The prompt is rendered by that model's template, without the policy's template options. The template writes the
    token that begins a text, so the tokenizer adds none. The response is encoded separately, as the policy wrote it,
    and text in it that looks like a control token stays text: a response cannot end a turn or begin another. The token
    that ends a turn of the assistant follows it, except after a response that was cut off by its length.
    """

    def __init__(self, path: str, data: DataConfig) -> None:
        """Read the model's tokenizer. Refuse a template that does not end its turns."""
        tokenizer = self.tokenizer = load_tokenizer(path, replace(data, template_file=None))
        self._prompts = PromptEncoder(tokenizer, {}, raw_text=data.raw_text)
        example = _row([{"role": "user", "content": "?"}], said="!")
        text = self._prompts.render(example)
        (ids,) = self._prompts.encode([text])
        self.end = self._prompts.answer(example, text, ids).ids[-1]

    def encode(self, messages: Sequence[Message], response: str, is_truncated: bool) -> tuple[list[int], list[int]]:
        """Return the tokens of the prompt and of the response. The score is read at the last token."""
        ids = self.text(response)
        return self.prompt(messages), ids if is_truncated and ids else [*ids, self.end]

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        (ids,) = self._prompts.encode([self._prompts.render(_row(messages))])
        return ids

    def text(self, response: str) -> list[int]:
        """Return the tokens of the response without the token that ends it."""
        (ids,) = self.tokenizer([response], add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return ids


def _row(messages: Sequence[Message], said: str = "") -> PromptRow:
    answer = ({"role": "assistant", "content": said},) if said else ()
    return PromptRow(tuple(messages), "", None, None, {}, None, "a prompt for a model with another tokenizer", answer)
