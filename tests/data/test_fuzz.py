"""Whatever stands in a file, a row of it is a prompt or a typed error that names file and row."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mrl.config.schema import ColumnsConfig
from mrl.data.rlhf_dataset import Prompt
from mrl.data.rows import PromptRow, RowParser
from mrl.errors import BadRow
from tests.data.conftest import OpenDataset, good_row, jsonl

NUM_LINES = 20_000
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
    chance = random.Random(5)
    good = json.dumps(good_row(3)).encode()
    Path("rows.jsonl").write_bytes(b"\n".join(spoilt(good, chance) for _ in range(NUM_LINES)) + b"\n")
    dataset = dataset_of(train="rows.jsonl", overlong="drop")
    kinds = {"prompt": 0, "bad": 0}
    for found in dataset.read(dataset.draws(0, NUM_LINES)):
        if isinstance(found, Prompt):
            kinds["prompt"] += 1
            assert found.text.startswith("<|user|>")
        elif found.error is not None:
            kinds["bad"] += 1
            assert isinstance(found.error, BadRow)
            assert found.error.where == f"rows.jsonl:{found.draw.row + 1}"
    assert min(kinds.values()) > NUM_LINES / 10


@settings(max_examples=1000, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(sorted(good_row())), ANY | MESSAGES))
def test_any_values(changes: dict[str, Any]) -> None:
    row = parsed(good_row() | changes)
    if isinstance(row, BadRow):
        assert row.where == "rows: row 0"
    else:
        assert row.messages[-1]["content"].strip()
        jsonl(row.extra_info, row.ground_truth, row.data_source)


def parsed(raw: dict[str, Any]) -> PromptRow | BadRow:
    try:
        return RowParser(ColumnsConfig(), "source").parse(raw, "rows: row 0")
    except BadRow as error:
        return error
