"""Files of either format give the same prompts, and unusual but valid rows are read correctly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mrl.config.data import ColumnsConfig, SourceConfig
from mrl.data.chat import ChatTokenizer
from mrl.data.rlhf_dataset import Overlong
from mrl.errors import DataError
from mrl.protocol import DataProto
from mrl.protocol.wire import decode, encode
from tests.data.conftest import OpenDataset, batch_of, good_row, jsonl


def columns_of(batch: DataProto) -> dict[str, list[Any]]:
    prompts = [row.tolist() for row in batch["prompts"].rows()]
    return {"prompts": prompts} | {name: column.tolist() for name, column in batch.non_tensor_batch.items()}


def test_columns_of_a_batch(here: Path, dataset_of: OpenDataset, tokenizer: ChatTokenizer) -> None:
    Path("rows.jsonl").write_bytes(jsonl(*[good_row(number) for number in range(5)]))
    batch = batch_of(dataset_of(train="rows.jsonl"), [3, 1])
    columns = columns_of(batch)
    text = "<|user|>What is 3?<|end|><|assistant|>"
    assert columns.pop("prompts")[0] == tokenizer([text], add_special_tokens=False)["input_ids"][0]
    assert columns == {
        "uid": ["train/0/3", "train/0/1"],
        "prompt_text": [text, text.replace("3", "1")],
        "messages": [({"role": "user", "content": f"What is {number}?"},) for number in (3, 1)],
        "data_source": ["numbers"] * 2,
        "ability": ["counting"] * 2,
        "ground_truth": ["3", "1"],
        "extra_info": [{"index": 3}, {"index": 1}],
    }
    assert str(batch["prompts"].values.dtype) == "torch.int32"
    assert batch.row_ids.tolist() == [3, 1]
    for name, column in batch.columns().items():
        assert len(decode(encode(column, name))) == 2


@pytest.mark.parametrize("row_group_size", [7, 10_000])
def test_parquet_and_jsonl_give_the_same(row_group_size: int, here: Path, dataset_of: OpenDataset) -> None:
    rows = [good_row(number, prompt=[{"role": "user", "content": f"é {number} 数"}]) for number in range(9000)]
    Path("rows.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows[:900]), "small.parquet", row_group_size=row_group_size)
    pq.write_table(pa.Table.from_pylist(rows), "large.parquet")
    lines = dataset_of(train="rows.jsonl")
    for name, size in (("small.parquet", 900), ("large.parquet", 9000)):
        table = dataset_of(train=name)
        assert len(table) == size
        indices = [0, size - 1, 5, 898, 3, 2, size // 2]
        assert columns_of(batch_of(table, indices)) == columns_of(batch_of(lines, indices))


def test_a_pattern_is_several_files_in_order(here: Path, dataset_of: OpenDataset) -> None:
    Path("part-1.jsonl").write_bytes(jsonl(good_row(0), good_row(1)))
    Path("part-2.jsonl").write_bytes(jsonl(good_row(2)))
    pq.write_table(pa.Table.from_pylist([good_row(3)]), "part-3.parquet")
    dataset = dataset_of(train={"lines": "part-*.jsonl", "table": "part-*.parquet"})
    assert dataset.sizes == {"lines": 3, "table": 1}
    assert batch_of(dataset, [3, 2, 1, 0])["ground_truth"].tolist() == ["3", "2", "1", "0"]
    Path("part-2.jsonl").write_bytes(b"{}\n")
    with pytest.raises(DataError, match=r"^part-2.jsonl:1: the column `prompt` does not exist"):
        batch_of(dataset_of(train="part-*.jsonl"), [2])


ALLOWED: dict[str, bytes] = {
    "byte order mark": b"\xef\xbb\xbf" + jsonl(good_row(7)),
    "Windows line ends": jsonl(good_row(7), good_row(8)).replace(b"\n", b"\r\n"),
    "no newline at the end": jsonl(good_row(7))[:-1],
    "extra columns": jsonl(good_row(7, level=3, notes=None)),
    "null where nothing is needed": jsonl(good_row(7, extra_info=None, ability=None)),
    "null message keys": jsonl(good_row(7, prompt=[{"role": "user", "content": "What is 7?", "name": None}])),
    "one text as prompt": jsonl(good_row(7, prompt="What is 7?")),
    "escaped line end": jsonl(good_row(7, notes="a\nb\u2028c")),
}


@pytest.mark.parametrize("case", ALLOWED)
def test_allowed(case: str, here: Path, dataset_of: OpenDataset) -> None:
    Path("rows.jsonl").write_bytes(ALLOWED[case])
    (text,) = batch_of(dataset_of(train="rows.jsonl"), [0])["prompt_text"]
    assert text == "<|user|>What is 7?<|end|><|assistant|>"


def test_many_lines_across_chunks(here: Path, dataset_of: OpenDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [good_row(number, notes="x" * (number % 40)) for number in range(100)]
    Path("rows.jsonl").write_bytes(jsonl(*rows))
    for chunk in (1, 7, 64, 4096):
        monkeypatch.setattr("mrl.data.row_files.CHUNK_BYTES", chunk)
        dataset = dataset_of(train="rows.jsonl")
        assert len(dataset) == 100
        assert batch_of(dataset, range(100))["ground_truth"].tolist() == [str(number) for number in range(100)]


def test_other_columns(here: Path, dataset_of: OpenDataset) -> None:
    row = {"question": "why?", "meta": {"answer": {"text": "so"}}, "key": 4}
    Path("rows.jsonl").write_bytes(jsonl(row, row))
    pq.write_table(pa.Table.from_pylist([row, row]), "rows.parquet")
    columns = ColumnsConfig(
        prompt="question", data_source=None, ability=None, ground_truth="meta.answer.text", extra_info=None, id="key"
    )
    for name in ("rows.jsonl", "rows.parquet"):
        dataset = dataset_of(train={"mine": SourceConfig(dataset=name, columns=columns)})
        batch = columns_of(batch_of(dataset, [0]))
        assert (batch["data_source"], batch["ground_truth"], batch["extra_info"]) == (["mine"], ["so"], [{}])
        (twice,) = dataset.check()
        second = "rows.jsonl:2" if name == "rows.jsonl" else "rows.parquet: row 1"
        first = second.replace("2", "1").replace("row 1", "row 0")
        assert str(twice.error) == f'{second}: the id "4" occurs twice, first at {first}'


def test_sources_have_ids_of_their_own(here: Path, dataset_of: OpenDataset) -> None:
    for name in ("one.jsonl", "other.jsonl"):
        Path(name).write_bytes(jsonl({"question": name, "answer": "a", "key": 4}))
    columns = ColumnsConfig(
        prompt="question", data_source=None, ability=None, ground_truth="answer", extra_info=None, id="key"
    )
    names = ("one", "other")
    sources = {name: SourceConfig(dataset=f"{name}.jsonl", columns=columns) for name in names}
    assert list(dataset_of(train=sources).check()) == []


def test_check_finds_everything_at_once(here: Path, dataset_of: OpenDataset) -> None:
    Path("rows.jsonl").write_bytes(jsonl(good_row(), b"{", good_row(2, prompt="x" * 90), good_row(3), b"[]"))
    rows = [(unusable.draw.row, unusable.num_tokens) for unusable in dataset_of(train="rows.jsonl").check()]
    assert rows == [(1, 0), (2, 93), (4, 0)]


@pytest.mark.parametrize(
    ("overlong", "expected"),
    [("left", "89" + "<|end|><|assistant|>"), ("right", "<|user|>012"), ("middle", "<|user|>0<|end|><|assistant|>")],
)
def test_cuts(overlong: Overlong, expected: str, here: Path, tokenizer: ChatTokenizer, dataset_of: OpenDataset) -> None:
    Path("rows.jsonl").write_bytes(jsonl(good_row(prompt="0123456789")))
    batch = batch_of(dataset_of(train="rows.jsonl", overlong=overlong, max_prompt_tokens=4), [0])
    assert tokenizer.decode(batch["prompts"].rows()[0].tolist()) == expected


@pytest.mark.parametrize("truth", ["7", ["7", "seven"], {"target": ["7", "seven"]}, {"target": "7"}])
def test_several_accepted_answers_stay_as_they_are(truth: Any, here: Path, dataset_of: OpenDataset) -> None:
    rows = [good_row(reward_model={"style": "rule", "ground_truth": truth})]
    Path("rows.jsonl").write_bytes(jsonl(*rows))
    pq.write_table(pa.Table.from_pylist(rows), "rows.parquet")
    for name in ("rows.jsonl", "rows.parquet"):
        assert list(batch_of(dataset_of(train=name), [0])["ground_truth"]) == [truth]
