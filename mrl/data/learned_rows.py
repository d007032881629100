"""Rows for supervised training: conversations with their answer, and ranked responses.

`mrl sft` reads an answer, or a conversation that ends with one. `mrl rm` and `mrl dpo` read the preferred and the other
responses: texts that follow the prompt of columns.prompt, or whole conversations, which share all messages except the
last as their prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mrl.config.data import ColumnsConfig
from mrl.config.sft import SftBatchConfig
from mrl.data.rows import Cells, Message, PromptRow, describe, read_prompt
from mrl.errors import BadRow, DataError

_PROMPT, _ANSWER = "prompt", "answer"
_LARGEST = 3.4028234663852886e38  # largest float32, the type of labels in the loss


def read_answered(
    batch: SftBatchConfig, columns: ColumnsConfig, source_name: str, raw: object, where: str
) -> PromptRow:
    """Return a prompt with the answer to learn: the ground truth and, with `loss_on: all`, also the earlier messages of
    the assistant."""
    read = read_prompt if batch.messages is None else read_conversation
    row = read(columns, source_name, raw, where)
    if row.ground_truth is None:
        raise DataError("the row has no answer to learn", where=where, fix="set columns.ground_truth or batch.messages")
    if not isinstance(row.ground_truth, str):
        what = "the ground truth is a list of accepted answers, but one answer is needed"
        raise BadRow(what, where=where, fix="set columns.ground_truth to a text column")
    messages = (*row.messages, _reply(row.ground_truth))
    first = len(row.messages)
    if batch.loss_on == "all":
        roles = [message["role"] for message in messages]
        first = roles.index("assistant", roles.index("user"))
    return replace(row, messages=messages[:first], said=messages[first:])


def read_conversation(columns: ColumnsConfig, source_name: str, raw: object, where: str) -> PromptRow:
    """Return a row whose chat messages in columns.prompt end with the answer, which becomes its ground truth."""
    row = raw if isinstance(raw, Mapping) else {}
    messages = row.get(columns.prompt)
    if not isinstance(messages, list) or not messages or not isinstance(messages[-1], Mapping):
        raise BadRow(f"column `{columns.prompt}` must be a list of messages", where=where)
    if (role := messages[-1].get("role")) != "assistant":
        what = f"column `{columns.prompt}` must end with a message of role assistant, not {role}"
        raise BadRow(what, where=where)
    parts = {_PROMPT: messages[:-1], _ANSWER: messages[-1].get("content")}
    return read_prompt(replace(columns, prompt=_PROMPT, ground_truth=_ANSWER), source_name, {**row, **parts}, where)


def read_ranked(columns: ColumnsConfig, source_name: str, raw: object, where: str) -> PromptRow:
    """Return a prompt with its responses, best first."""
    cells = Cells(raw, where)
    responses = {columns.chosen: cells.at(columns.chosen, "chosen")}
    if columns.rejected is not None:
        responses |= _others(cells.at(columns.rejected, "rejected"), columns.rejected)
    if empty := [column for column, value in responses.items() if value == []]:
        raise cells.bad(empty[0], "is an empty list, so the row has no response")
    if any(isinstance(value, list) for value in responses.values()):
        messages, replies = _conversations(cells, responses, columns.prompt)
    else:
        messages = cells.messages(columns.prompt)
        replies = [_reply(cells.text_of(value, column, "chosen")) for column, value in responses.items()]
    if len({message["content"] for message in replies}) < len(replies):
        raise BadRow("two responses have the same text, so neither can be preferred", where=where)
    return PromptRow(
        messages=messages,
        ground_truth=None,
        extra_info={},
        said=tuple(replies),
        is_ranked=True,
        labels=_labels(cells, columns.label, len(replies)) if columns.label else (),
        **cells.names(columns, source_name),
    )


def read_labeled(columns: ColumnsConfig, source_name: str, raw: object, where: str) -> PromptRow:
    """Return a prompt with responses labeled 1 (desirable) or 0: by columns.label, or the chosen one and the others."""
    row = read_ranked(replace(columns, label=None), source_name, raw, where)
    if columns.label is None:
        return replace(row, labels=(1.0, *[0.0] * (len(row.said) - 1)))
    cells = Cells(raw, where)
    value = cells.at(columns.label, "label")
    if not isinstance(value, int) or value not in (0, 1):
        raise cells.bad(columns.label, f"must be true (desirable) or false (undesirable), not {describe(value)}")
    return replace(row, labels=(float(value),))


def _reply(content: str) -> Message:
    return {"role": "assistant", "content": content}


def _others(value: Any, column: str) -> dict[str, Any]:
    """Return the responses that were not preferred, one or a list, by their place in the row."""
    if not isinstance(value, list) or not value or any(isinstance(item, Mapping) for item in value):
        return {column: value}
    return {f"{column}[{number}]": item for number, item in enumerate(value)}


def _conversations(
    cells: Cells, responses: Mapping[str, Any], prompt: str
) -> tuple[tuple[Message, ...], list[Message]]:
    """Return the messages shared by all conversations, and the last message of each."""
    conversations: dict[str, list[Message]] = {}
    for column, value in responses.items():
        if isinstance(value, list) and isinstance(value[0], str):
            fix = "write one text; only columns.rejected may be a list of texts"
            raise cells.bad(column, "must be text or a list of messages, not a list of texts", fix)
        if not isinstance(value, list):
            raise cells.bad(column, f"must be a list of messages like the others, not {describe(value)}")
        messages = [cells.message(item, f"{column}[{number}]") for number, item in enumerate(value)]
        if messages[-1]["role"] != "assistant":
            raise cells.bad(column, f"must end with a message of role assistant, not {messages[-1]['role']}")
        conversations[column] = messages
    first, *rest = conversations
    for column in rest:
        if conversations[column][:-1] != conversations[first][:-1]:
            what = f"differs from `{first}` before its last message, so the two answer different prompts"
            raise cells.bad(column, what, "make all messages except the last equal")
    shared = tuple(conversations[first][:-1])
    answered = cells.prompt(shared, f"{first}[:-1]") if shared else cells.messages(prompt)
    return answered, [messages[-1] for messages in conversations.values()]


def _labels(cells: Cells, column: str, num_responses: int) -> tuple[float, ...]:
    """Return a number for each response. A single number belongs to the preferred response, and the others get 0."""
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
