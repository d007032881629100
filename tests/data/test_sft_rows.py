"""Answers to learn from: what is taken off a conversation, how it is ended, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from mrl.data.chat import ChatTokenizer
from mrl.data.sft_rows import ANSWER, PROMPT, MessageRows, with_responses
from mrl.data.sources import MadeRows
from mrl.errors import BadRow, DataError
from mrl.protocol import DataProto
from mrl.protocol.columns import from_rows

TALK = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "and 2+2?"},
    {"role": "assistant", "content": "4"},
]


def rows_of(*rows: Any) -> MessageRows:
    return MessageRows(MadeRows(list(rows), "made"), "talk")


def test_the_last_message_is_the_answer_and_the_rest_the_prompt() -> None:
    rows = rows_of({"talk": TALK, "kept": 1}, {"talk": TALK[:2]})
    assert len(rows) == 2
    assert rows.where(1) == "made: row 1"
    assert rows.row(0) == {"talk": TALK, "kept": 1, PROMPT: TALK[:3], ANSWER: "4"}
    assert rows.row(1) == {"talk": TALK[:2], PROMPT: TALK[:1], ANSWER: "2"}
    assert len(TALK) == 4, "the row itself stays as it was"


@pytest.mark.parametrize("wrong", [[], {"talk": None}, {"talk": []}, {"talk": "hi"}, {"talk": ["hi"]}, {}], ids=repr)
def test_what_is_no_conversation_is_a_bad_row(wrong: Any) -> None:
    with pytest.raises(BadRow) as caught:
        rows_of(wrong).row(0)
    assert str(caught.value) == "made: row 0: column `talk` must be a list of messages"


def test_a_conversation_ends_with_the_assistant() -> None:
    with pytest.raises(BadRow) as caught:
        rows_of({"talk": TALK[:3]}).row(0)
    assert str(caught.value) == "made: row 0: column `talk` must end with a message of the assistant, not of user"


def prompts_of(answers: list[str]) -> DataProto:
    return DataProto.from_dict(
        {"prompts": from_rows([[1]] * len(answers))},
        {"ground_truth": answers, "uid": [f"u{number}" for number in range(len(answers))]},
        row_ids=[7 * number + 3 for number in range(len(answers))],
    )


def test_every_answer_is_ended_as_the_model_ends_what_it_says(tokenizer: ChatTokenizer) -> None:
    answers = ["four", "", "4 and more"]
    batch = with_responses(prompts_of(answers), tokenizer, max_tokens=11)
    ended = [row.tolist() for row in batch["responses"].rows()]
    assert [tokenizer.decode(ids) for ids in ended] == [f"{answer}<|end|>" for answer in answers]
    assert all(ids.count(tokenizer.eos_token_id or -1) == 1 for ids in ended)
    assert batch.row_ids.tolist() == [3, 10, 17]
    assert set(batch.columns()) == {"prompts", "responses", "ground_truth", "uid"}


def test_an_answer_may_be_as_long_as_allowed_with_its_end(tokenizer: ChatTokenizer) -> None:
    with_responses(prompts_of(["1234"]), tokenizer, max_tokens=5)
    with pytest.raises(DataError) as caught:
        with_responses(prompts_of(["1", "1234"]), tokenizer, max_tokens=4)
    assert str(caught.value) == (
        "the answer of u1 has 5 tokens; batch.max_response_tokens is 4\n"
        "  fix: batch.max_response_tokens=5, or shorten the answer"
    )


def test_a_model_that_ends_nothing_learns_nothing() -> None:
    endless = cast(ChatTokenizer, SimpleNamespace(eos_token_id=None))
    with pytest.raises(DataError, match=r"^model.path: the tokenizer has no end-of-sequence token"):
        with_responses(prompts_of(["4"]), endless, max_tokens=4)
