"""Ranked responses as batches: the rows of a pair or a list, and their contents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mrl.config.data import ColumnsConfig, SourceConfig
from mrl.config.resolved.load import load_config_of
from mrl.data.chat import ChatTokenizer
from mrl.data.learned_rows import read_labeled, read_ranked
from mrl.data.rlhf_dataset import open_sft_dataset
from mrl.data.rows import PromptRow
from mrl.data.toy import addition
from mrl.errors import DataError
from mrl.protocol import DataProto
from mrl.trainer.role_client import group_sizes
from tests.data.conftest import batch_of, jsonl

LAPTOP_RM = Path(__file__).parents[2] / "configs" / "laptop-rm.yaml"
USER, SYSTEM = {"role": "user", "content": "1+1?"}, {"role": "system", "content": "Add."}


def said(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def parsed(row: dict[str, Any], **columns: Any) -> PromptRow:
    plain: dict[str, Any] = {"data_source": None, "ability": None, "ground_truth": None, "extra_info": None}
    return read_ranked(ColumnsConfig(**(plain | columns)), "pairs", row, "rows.jsonl:1")


def ranked_batch(
    rows: list[dict[str, Any]], tokenizer: ChatTokenizer, file: str = "rows.jsonl", **columns: Any
) -> DataProto:
    Path("rows.jsonl").write_bytes(jsonl(*rows))
    if file == "rows.parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    config = load_config_of("rm", str(LAPTOP_RM)).config
    source = SourceConfig(dataset=file, columns=ColumnsConfig(data_source=None, ability=None, **columns))
    return batch_of(open_sft_dataset({"s": source}, config, tokenizer), range(len(rows)))


def test_texts_follow_the_prompt() -> None:
    row = parsed({"prompt": "1+1?", "chosen": "2", "rejected": "4"})
    assert (row.messages, row.said, row.labels) == ((USER,), (said("2"), said("4")), ())
    assert (row.data_source, row.ground_truth, row.extra_info) == ("pairs", None, {})


def test_conversations_hold_their_prompt() -> None:
    row = parsed({"chosen": [SYSTEM, USER, said("2")], "rejected": [SYSTEM, USER, said("4")]})
    assert (row.messages, row.said) == ((SYSTEM, USER), (said("2"), said("4")))


def test_messages_of_the_assistant_alone_follow_the_column_of_the_prompt() -> None:
    row = parsed({"prompt": [SYSTEM, USER], "chosen": [said("2")], "rejected": [said("4")]})
    assert (row.messages, row.said) == ((SYSTEM, USER), (said("2"), said("4")))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1+1?", "chosen": "2", "rejected": ["3", "4"]},
        {"chosen": [USER, said("2")], "rejected": [[USER, said("3")], [USER, said("4")]]},
    ],
    ids=["texts", "conversations"],
)
def test_a_list_of_others_is_ranked(row: dict[str, Any]) -> None:
    assert (parsed(row).messages, parsed(row).said) == ((USER,), (said("2"), said("3"), said("4")))


def test_labels_are_one_number_or_one_for_each() -> None:
    row = {"prompt": "1+1?", "chosen": "2", "rejected": ["3", "4"]}
    assert parsed(row | {"margin": 3}, label="margin").labels == (3.0, 0.0, 0.0)
    assert parsed(row | {"margin": [3, 1.5, -1]}, label="margin").labels == (3.0, 1.5, -1.0)
    assert parsed({"prompt": "1+1?", "chosen": "2", "score": 0.5}, rejected=None, label="score").labels == (0.5,)


def test_each_response_is_a_row_behind_its_prompt(here: Path, tokenizer: ChatTokenizer) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "1+1?", "chosen": "2", "rejected": ["3", "44"], "margin": [2, 1, 0]},
        {"prompt": "2+3?", "chosen": "5", "rejected": "55", "margin": 0.25},
    ]
    batch = ranked_batch(rows, tokenizer, label="margin")
    assert [tokenizer.decode(row.tolist()) for row in batch["responses"].rows()] == [
        f"{text}<|end|>" for text in ("2", "3", "44", "5", "55")
    ]
    prompts = [tokenizer.decode(row.tolist()) for row in batch["prompts"].rows()]
    assert ["1+1?" in prompt for prompt in prompts] == [True, True, True, False, False]
    assert (batch["rank"].tolist(), batch["label"].tolist()) == ([0, 1, 2, 0, 1], [2.0, 1.0, 0.0, 0.25, 0.0])
    assert all(bool(mask.all()) for mask in batch["response_mask"].rows())
    assert len(set(batch.row_ids.tolist())) == 5
    sizes = group_sizes(batch)
    assert sizes is not None
    assert sizes.tolist() == [3, 2]


def test_responses_with_numbers_alone_are_groups_of_one(here: Path, tokenizer: ChatTokenizer) -> None:
    rows = [{"prompt": "1+1?", "chosen": str(number), "score": number / 4} for number in range(3)]
    batch = ranked_batch(rows, tokenizer, rejected=None, label="score")
    sizes = group_sizes(batch)
    assert sizes is not None
    assert (sizes.tolist(), batch["label"].tolist()) == ([1, 1, 1], [0.0, 0.25, 0.5])


def test_pairs_of_a_parquet_file(here: Path, tokenizer: ChatTokenizer) -> None:
    """Rows with texts after a prompt, or with conversations that contain their prompt."""
    pairs: list[dict[str, Any]] = [
        {"prompt": "1+1?", "chosen": "2", "rejected": "3", "margin": 1.0},
        {"chosen": [USER, said("2")], "rejected": [USER, said("3")], "margin": 1.0},
    ]
    for pair in pairs:
        batch = ranked_batch([pair], tokenizer, "rows.parquet", label="margin")
        texts = [tokenizer.decode(row.tolist()) for row in batch["responses"].rows()]
        assert (texts, batch["label"].tolist()) == (["2<|end|>", "3<|end|>"], [1.0, 0.0])
        assert "1+1?" in tokenizer.decode(next(iter(batch["prompts"].rows())).tolist())


def test_rows_without_ranks_stand_for_themselves() -> None:
    assert group_sizes(DataProto.from_dict({}, {"text": ["a", "b"]})) is None


# --- the toy's pairs --------------------------------------------------------------------------------------------


def total(row: dict[str, Any]) -> int:
    return sum(map(int, row["prompt"][0]["content"].rstrip("=").split("+")))


def test_the_right_sum_is_preferred_to_one_with_a_wrong_digit() -> None:
    rows = addition(pairs=3, largest=20)
    assert len(rows) == 3 * 11 * 11
    for row in (rows[number] for number in range(len(rows))):
        right, wrong = row["chosen"], row["rejected"]
        assert int(right) == total(row)
        assert len(wrong) == len(right)
        assert sum(a != b for a, b in zip(right, wrong, strict=True)) == 1
    assert [rows[number]["prompt"] for number in range(3)] == [rows[0]["prompt"]] * 3


def test_a_pair_is_a_function_of_its_row() -> None:
    once, again = addition(pairs=2, swapped=0.3), addition(pairs=2, swapped=0.3)
    assert [once[number] for number in (0, 7, 4000)] == [again[number] for number in (0, 7, 4000)]
    assert once[4000] != once[4001]


@pytest.mark.parametrize("swapped", [0.0, 0.3, 1.0])
def test_a_share_of_the_pairs_stands_the_wrong_way_round(swapped: float) -> None:
    rows = addition(pairs=1, swapped=swapped)
    wrong = [int(row["chosen"]) != total(row) for row in (rows[number] for number in range(4000))]
    assert sum(wrong) / len(wrong) == pytest.approx(swapped, abs=0.03)


def test_no_problem_is_in_both_parts() -> None:
    train, validation = (
        {rows[number]["prompt"][0]["content"] for number in range(len(rows))}
        for rows in (addition(pairs=2, largest=40, part=part) for part in ("train", "validation"))
    )
    assert train
    assert validation
    assert not train & validation


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"swapped": 0.1}, "swapped must be a share of the pairs, from 0 to 1, not 0.1 of 0 pairs"),
        ({"pairs": 1, "swapped": 1.1}, "swapped must be a share of the pairs, from 0 to 1, not 1.1 of 1 pairs"),
        ({"pairs": 1, "mistakes": 0.5}, "pairs and mistakes exclude each other"),
        ({"pairs": -1}, "pairs must be at least 0, not -1"),
    ],
)
def test_options_that_make_no_pairs(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        addition(**options)


@pytest.mark.parametrize(("label", "expected"), [(True, 1.0), (False, 0.0), (1, 1.0), (0, 0.0)])
def test_a_labeled_response_is_alone(label: object, expected: float) -> None:
    columns = ColumnsConfig(data_source=None, ability=None, chosen="completion", rejected=None, label="label")
    row = read_labeled(columns, "answers", {"prompt": "1+1?", "completion": "2", "label": label}, "rows.jsonl:1")
    assert row.labels == (expected,)
    assert [message["content"] for message in row.said] == ["2"]


def test_without_a_label_the_chosen_response_is_desirable_and_the_others_are_not() -> None:
    columns = ColumnsConfig(data_source=None, ability=None)
    raw = {"prompt": "1+1?", "chosen": "2", "rejected": ["3", "4"]}
    assert read_labeled(columns, "answers", raw, "rows.jsonl:1").labels == (1.0, 0.0, 0.0)
