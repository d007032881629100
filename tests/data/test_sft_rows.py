"""Answers to learn from: the part of a conversation, its end, and refused rows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow
import pyarrow.parquet
import pytest

from mrl.config.data import ColumnsConfig, DataConfig, SourceConfig
from mrl.config.sft import SftBatchConfig
from mrl.data.chat import ChatTokenizer
from mrl.data.conversation import PromptEncoder
from mrl.data.learned_rows import read_conversation
from mrl.data.rlhf_dataset import RLHFDataset, open_sft_dataset
from mrl.data.rows import PromptRow
from mrl.errors import BadRow, DataError
from tests.data.conftest import batch_of, jsonl

TALK = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "and 2+2?"},
    {"role": "assistant", "content": "4"},
]


def parse(raw: Any) -> PromptRow:
    columns = ColumnsConfig(prompt="talk", data_source=None, ability=None, ground_truth=None, extra_info=None)
    return read_conversation(columns, "made", raw, "made: row 0")


@pytest.mark.parametrize(("talk", "answer"), [(TALK, "4"), (TALK[:2], "2")], ids=["long", "short"])
def test_the_last_message_is_the_answer_and_the_rest_the_prompt(talk: list[Any], answer: str) -> None:
    raw = {"talk": talk, "prompt": "another column"}
    row = parse(raw)
    assert (list(row.messages), row.ground_truth, row.where) == (talk[:-1], answer, "made: row 0")
    assert raw == {"talk": talk, "prompt": "another column"}, "the row itself is unchanged"


@pytest.mark.parametrize("wrong", [[], {"talk": None}, {"talk": []}, {"talk": "hi"}, {"talk": ["hi"]}, {}], ids=repr)
def test_what_is_no_conversation_is_a_bad_row(wrong: Any) -> None:
    with pytest.raises(BadRow) as caught:
        parse(wrong)
    assert str(caught.value) == "made: row 0: column `talk` must be a list of messages"


def test_a_conversation_ends_with_the_assistant() -> None:
    with pytest.raises(BadRow) as caught:
        parse({"talk": TALK[:3]})
    assert str(caught.value) == "made: row 0: column `talk` must end with a message of role assistant, not user"


def dataset_of(rows: list[Any], tokenizer: ChatTokenizer, here: Path, **batch: Any) -> RLHFDataset:
    (here / "rows.jsonl").write_bytes(jsonl(*rows))
    columns = ColumnsConfig(data_source=None, ability=None, ground_truth="answer", extra_info=None)
    limits = {"rows_per_update": 1, "max_prompt_tokens": 64, "max_response_tokens": 64} | batch
    config = SimpleNamespace(data=DataConfig(train={}), batch=SftBatchConfig(**limits))
    return open_sft_dataset({"s": SourceConfig(dataset="rows.jsonl", columns=columns)}, cast(Any, config), tokenizer)


def test_every_answer_is_ended_as_the_template_ends_it(tokenizer: ChatTokenizer, here: Path) -> None:
    answers = ["four", "4", "4 and more"]
    batch = batch_of(
        dataset_of([{"prompt": "2+2?", "answer": answer} for answer in answers], tokenizer, here), [0, 1, 2]
    )
    ended = [row.tolist() for row in batch["responses"].rows()]
    assert [tokenizer.decode(ids) for ids in ended] == [f"{answer}<|end|>" for answer in answers]
    assert [tokenizer.decode(row.tolist()) for row in batch["prompts"].rows()] == [
        "<|user|>2+2?<|end|><|assistant|>"
    ] * 3
    assert bool(batch.values("response_mask").all())


@pytest.mark.parametrize("loss_on", ["last", "all"])
def test_all_answers_or_the_last(loss_on: str, tokenizer: ChatTokenizer, here: Path) -> None:
    talk = [{"role": "assistant", "content": "hi"}, *TALK]
    batch = batch_of(dataset_of([{"talk": talk}], tokenizer, here, messages="talk", loss_on=loss_on), [0])
    ids, mask = batch.values("responses"), batch.values("response_mask")
    (prompt,) = batch["prompts"].rows()
    greeted = "<|assistant|>hi<|end|><|user|>1+1?<|end|><|assistant|>"
    between = "<|user|>and 2+2?<|end|><|assistant|>"
    if loss_on == "last":
        assert tokenizer.decode(prompt.tolist()) == f"{greeted}2<|end|>{between}"
        assert (tokenizer.decode(ids.tolist()), mask.all()) == ("4<|end|>", True)
    else:
        assert tokenizer.decode(prompt.tolist()) == greeted, "a greeting answers no message"
        assert tokenizer.decode(ids.tolist()) == f"2<|end|>{between}4<|end|>"
        assert tokenizer.decode(ids[mask].tolist()) == "2<|end|>4<|end|>"


def test_an_answer_may_be_as_long_as_allowed_with_its_end(tokenizer: ChatTokenizer, here: Path) -> None:
    rows = [{"prompt": "1?", "answer": "1"}, {"prompt": "2?", "answer": "1234"}]
    batch_of(dataset_of(rows, tokenizer, here, max_response_tokens=5), [0, 1])
    with pytest.raises(DataError) as caught:
        batch_of(dataset_of(rows, tokenizer, here, max_response_tokens=4), [0, 1])
    assert not isinstance(caught.value, BadRow), "it is not skipped like a bad row"
    assert str(caught.value) == (
        "rows.jsonl:2: the answer has 5 tokens; batch.max_response_tokens is 4\n"
        "  fix: batch.max_response_tokens=5, or shorten the answer"
    )


def test_conversations_of_a_parquet_file(tokenizer: ChatTokenizer, here: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"talk": TALK, "other": 1}]), here / "rows.parquet")
    limits = SftBatchConfig(rows_per_update=1, max_prompt_tokens=64, max_response_tokens=64, messages="talk")
    config: Any = SimpleNamespace(data=DataConfig(train={}), batch=limits)
    columns = ColumnsConfig(data_source=None, ability=None, extra_info=None)
    sources = {"s": SourceConfig(dataset="rows.parquet", columns=columns)}
    batch = batch_of(open_sft_dataset(sources, config, tokenizer), [0])
    assert tokenizer.decode(batch.values("responses").tolist()) == "4<|end|>"


def test_raw_text_is_ended_by_the_end_of_the_tokenizer(tokenizer: ChatTokenizer) -> None:
    encoder = PromptEncoder(tokenizer, {}, raw_text=True)
    row = PromptRow(tuple(TALK[:1]), "s", None, None, {}, None, "here", tuple(TALK[1:2]))
    answer = encoder.answer(row, "1+1?", [])
    assert (tokenizer.decode(answer.ids), answer.is_learned) == ("2<|end|>", [True, True])
