"""Responses to a prompt of which one was preferred to others: what `mrl rm` and `mrl dpo` read.

The preferred response and the others are texts that follow the prompt of columns.prompt, or whole conversations, whose
messages up to the last are the prompt that they share.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mrl.data.rows import Cells, PromptRow, RowParser, describe
from mrl.errors import BadRow

Message = dict[str, str]
_LARGEST = 3.4028234663852886e38  # float32's, in which labels are learned from


class RankedParser(RowParser):
    """Turn raw rows into a prompt with its responses, the best first."""

    def parse(self, raw: object, where: str) -> PromptRow:
        if not isinstance(raw, Mapping):
            raise BadRow(f"a row must be an object of columns, not {describe(raw)}", where=where)
        cells, columns = Cells(raw, where), self._columns
        found = {columns.chosen: cells.at(columns.chosen, "chosen")}
        if columns.rejected is not None:
            found |= _others(cells.at(columns.rejected, "rejected"), columns.rejected)
        if empty := [column for column, value in found.items() if value == []]:
            raise cells.bad(empty[0], "is an empty list: there is no response")
        if any(isinstance(value, list) for value in found.values()):
            messages, said = _conversations(cells, found, columns.prompt)
        else:
            messages = cells.messages(columns.prompt)
            said = [_said(cells.text_of(value, column, "chosen")) for column, value in found.items()]
        if len({message["content"] for message in said}) < len(said):
            raise BadRow("two responses are the same text: neither was preferred to the other", where=where)
        return PromptRow(
            messages=messages,
            data_source=self.data_source(raw, where),
            ability=cells.optional_text(columns.ability, "ability") if columns.ability else None,
            ground_truth=None,
            extra_info={},
            id=cells.id(columns.id) if columns.id else None,
            where=where,
            said=tuple(said),
            labels=_labels(cells, columns.label, len(said)) if columns.label else (),
        )


def _said(content: str) -> Message:
    return {"role": "assistant", "content": content}


def _others(value: Any, column: str) -> dict[str, Any]:
    """Return the responses that were not preferred, by where they stand: one, or a list of them."""
    if not isinstance(value, list) or not value or any(isinstance(each, Mapping) for each in value):
        return {column: value}
    return {f"{column}[{number}]": each for number, each in enumerate(value)}


def _conversations(cells: Cells, found: Mapping[str, Any], prompt: str) -> tuple[tuple[Message, ...], list[Message]]:
    """Return the messages that all conversations begin with, and the last of each."""
    conversations: dict[str, list[Message]] = {}
    for column, value in found.items():
        if isinstance(value, list) and isinstance(value[0], str):
            fix = "one text; a list of others may stand in columns.rejected"
            raise cells.bad(column, "must be text or a list of messages, not a list of texts", fix)
        if not isinstance(value, list):
            raise cells.bad(column, f"must be a list of messages as the others are, not {describe(value)}")
        messages = [cells.message(each, f"{column}[{number}]") for number, each in enumerate(value)]
        if messages[-1]["role"] != "assistant":
            raise cells.bad(column, f"must end with a message of the assistant, not of {messages[-1]['role']}")
        conversations[column] = messages
    first, *others = conversations
    for column in others:
        if conversations[column][:-1] != conversations[first][:-1]:
            what = f"differs from `{first}` before its last message: the two answer different prompts"
            raise cells.bad(column, what, "a pair shares its prompt, message by message")
    shared = tuple(conversations[first][:-1])
    answered = cells.prompt(shared, f"{first}[:-1]") if shared else cells.messages(prompt)
    return answered, [messages[-1] for messages in conversations.values()]


def _labels(cells: Cells, column: str, num_responses: int) -> tuple[float, ...]:
    """Return a number for each response. One alone is that of the preferred response, and the others have 0."""
    value = cells.at(column, "label")
    numbers = value if isinstance(value, list) else [value, *[0.0] * (num_responses - 1)]
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise cells.bad(column, f"must be a number, not {describe(number)}")
        if not abs(number) <= _LARGEST:
            shown = str(number) if len(str(number)) < 32 else f"one of {len(str(number))} digits"
            raise cells.bad(column, f"must be a finite number, at most 3.4e38, not {shown}")
    if len(numbers) != num_responses:
        raise cells.bad(column, f"has {len(numbers)} numbers for {num_responses} responses")
    return tuple(map(float, numbers))
