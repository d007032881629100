"""For any file content, each row is a prompt or a typed error that names file and row."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mrl.config.data import ColumnsConfig
from mrl.data import template_process
from mrl.data.chat_template import ChatTemplate, TemplateFailure
from mrl.data.rlhf_dataset import Prompt
from mrl.data.rows import PromptRow, read_prompt
from mrl.errors import BadRow, DataError
from tests.data.chat_templates import TEMPLATES
from tests.data.conftest import OpenDataset, good_row, jsonl
from tests.fuzzing import SECONDS, changed, damaged, let_run, rounds

NUM_LINES = 200
NASTY = ["{% for i in range(9**5) %}", "{{ 9 ** 9 ** 9 }}", "{{ x.y.z }}", "{{ 'a' * 10**9 }}", "{% break %}", "{#"]
SPICE = (b"\0", b"\xff", b'"', b"{", b"}", b"[", b"\\ud800", b"\\u0000", b"null", b"1e999", b",", b"\r", b"<|end|>")
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
ANY = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8
)
MESSAGES = st.lists(st.dictionaries(st.sampled_from(["role", "content", "name"]), ANY, max_size=3) | ANY, max_size=3)


def spoilt(line: bytes, chance: random.Random) -> bytes:
    for _ in range(chance.randint(0, 3)):
        at, end = sorted(chance.choices(range(len(line) + 1), k=2))
        line = line[:at] + chance.choice(SPICE) + line[chance.choice((at, min(at + 1, len(line)), end)) :]
    return line.replace(b"\n", b"")


def test_spoilt_lines(here: Path, dataset_of: OpenDataset) -> None:
    good = json.dumps(good_row(3)).encode()
    kinds = {"prompt": 0, "bad": 0}
    for chance in rounds("jsonl"):
        Path("rows.jsonl").write_bytes(b"\n".join(spoilt(good, chance) for _ in range(NUM_LINES)) + b"\n")
        dataset = dataset_of(train="rows.jsonl", overlong="drop")
        for result in dataset.read(dataset.draws(0, NUM_LINES)):
            if isinstance(result, Prompt):
                kinds["prompt"] += 1
                assert result.text.startswith("<|user|>")
            elif result.error is not None:
                kinds["bad"] += 1
                assert isinstance(result.error, BadRow)
                assert result.error.where == f"rows.jsonl:{result.draw.row + 1}"
    assert min(kinds.values()) > sum(kinds.values()) / 10


def test_damaged_tables(here: Path, dataset_of: OpenDataset) -> None:
    """Damaged pages, footers and types of a parquet file give rows or typed errors, and never end the process."""
    pq.write_table(pa.Table.from_pylist([good_row(number) for number in range(50)]), "whole", row_group_size=20)
    whole = Path("whole").read_bytes()
    num_refused = 0
    for chance in rounds("parquet"):
        Path("rows.parquet").write_bytes(damaged(whole, chance))
        try:
            dataset = dataset_of(train="rows.parquet")
            assert all(isinstance(result.error, DataError) for result in dataset.check())
        except DataError:
            num_refused += 1
    assert num_refused


def test_tables_of_any_type(here: Path, dataset_of: OpenDataset) -> None:
    for chance in rounds("tables"):
        try:
            table = pa.Table.from_pylist([changed(good_row(number), chance) for number in range(3)])
            pq.write_table(table, "rows.parquet")
        except (pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError):
            continue  # no table can contain that
        try:
            dataset = dataset_of(train="rows.parquet", overlong="drop")
            assert all(result.error is None or isinstance(result.error, DataError) for result in dataset.check())
        except DataError:
            pass


def test_damaged_templates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Published chat templates with removed, doubled or exchanged parts."""
    monkeypatch.setattr(template_process, "COMPUTES_S", 0.5)
    pieces = [piece for text, _, _ in TEMPLATES.values() for piece in re.split(r"(?<=[%}]})", text)] + NASTY
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>b</think>c"}]
    rendered = 0
    for chance in rounds("templates"):
        parts = chance.choice([text for text, _, _ in TEMPLATES.values()])
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(parts))
            parts = parts[:at] + chance.choice(pieces) + parts[at + chance.randrange(40) :]
        try:
            ChatTemplate(parts, '{"bos_token": "<s>", "tools": null}').render(talk, calls_for_answer=True)
            rendered += 1
        except TemplateFailure:
            pass


@settings(max_examples=int(75 * SECONDS), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(sorted(good_row())), ANY | MESSAGES))
def test_any_values(changes: dict[str, Any]) -> None:
    let_run()
    row = parsed(good_row() | changes)
    if isinstance(row, BadRow):
        assert row.where == "rows: row 0"
    else:
        assert row.messages[-1]["content"].strip()
        jsonl(row.extra_info, row.ground_truth, row.data_source)


def parsed(raw: dict[str, Any]) -> PromptRow | BadRow:
    try:
        return read_prompt(ColumnsConfig(), "source", raw, "rows: row 0")
    except BadRow as error:
        return error
