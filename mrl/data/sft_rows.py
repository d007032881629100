"""Prompts with the answers that a model is to learn: what SFT reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mrl.data.chat import ChatTokenizer
from mrl.data.sources import RawRows
from mrl.errors import BadRow, DataError
from mrl.protocol import DataProto
from mrl.protocol.columns import from_rows

PROMPT, ANSWER = "prompt", "answer"


class MessageRows:
    """Rows whose chat messages end with the answer, as rows of prompt and answer."""

    def __init__(self, rows: RawRows, column: str) -> None:
        self._rows = rows
        self._column = column

    def __len__(self) -> int:
        return len(self._rows)

    def where(self, index: int) -> str:
        return self._rows.where(index)

    def row(self, index: int) -> Any:
        """Return the row, its last message taken off."""
        raw, where = self._rows.row(index), self.where(index)
        messages = raw.get(self._column) if isinstance(raw, Mapping) else None
        if not isinstance(messages, list) or not messages or not isinstance(messages[-1], Mapping):
            raise BadRow(f"column `{self._column}` must be a list of messages", where=where)
        if messages[-1].get("role") != "assistant":
            what = (
                f"column `{self._column}` must end with a message of the assistant, not of {messages[-1].get('role')}"
            )
            raise BadRow(what, where=where)
        return {**raw, PROMPT: messages[:-1], ANSWER: messages[-1].get("content")}


def with_responses(prompts: DataProto, tokenizer: ChatTokenizer, max_tokens: int) -> DataProto:
    """Return the batch with each row's answer as its response, ended as the model ends what it says."""
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no end-of-sequence token, so no answer could be ended", where="model.path")
    answers = list(prompts["ground_truth"])
    uids = prompts["uid"]
    rows = []
    for uid, ids in zip(uids, tokenizer(answers, add_special_tokens=False)["input_ids"], strict=True):
        if len(ids) + 1 > max_tokens:
            raise DataError(
                f"the answer of {uid} has {len(ids) + 1} tokens; batch.max_response_tokens is {max_tokens}",
                fix=f"batch.max_response_tokens={len(ids) + 1}, or shorten the answer",
            )
        rows.append(torch.tensor([*ids, tokenizer.eos_token_id], dtype=torch.int32))
    return prompts.with_column("responses", from_rows(rows))
