"""Small files of published data sets: real parquet and jsonl with the columns and texts of the originals."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mrl.data.published import PUBLISHED, SEARCH_R1, Published
from mrl.files import sha256

GSM8K = [
    {"question": "Ann has 3 pens and buys 4. How many?", "answer": "She has 3+4=<<3+4=7>>7 pens.\n#### 7"},
    {"question": "How far is it?", "answer": "It is 1,000 + 200 = 1,200 km.\n#### 1,200"},
    {"question": "What is left?", "answer": "He owes 5.\n#### -5"},
]
MATH = [
    {
        "problem": "Find $x$.",
        "level": "Level 1",
        "type": "Algebra",
        "solution": "First \\boxed{1}, so $x = \\boxed{\\frac{1}{2}}$.",
    },
    {
        "problem": "Which set?",
        "level": "Level 5",
        "type": "Number Theory",
        "solution": "$\\boxed{\\left\\{ 1, {2} \\right\\}}$",
    },
    {"problem": "How many?", "level": "Level 2", "type": "Algebra", "solution": "There are $\\boxed 2$."},
]
EMPTY_BOX = {
    "problem": "How many primes?",
    "level": "Level 5",
    "type": "Number Theory",
    "solution": "There are $\\boxed{}$.",
}
COUNTDOWN = [
    {"target": 98, "nums": [44, 19, 35]},
    {"target": 24, "nums": [1, 3, 4, 6]},
    {"target": 98, "nums": [35, 44, 19]},
    {"target": 24, "nums": [2, 3, 4]},
]
_DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\nRemember to put your answer on "
    'its own line after "Answer:".'
)


def dapo(question: str, answer: str, index: str = "0", form: str = _DAPO) -> dict[str, Any]:
    """Return a row of DAPO-Math-17k."""
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": form.format(question), "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


def search_r1(question: str, *accepted: str, source: str = "nq", index: int = 0) -> dict[str, Any]:
    """Return a row of Search-R1's data, whose index restarts with each source."""
    return {
        "id": f"train_{index}",
        "question": question,
        "golden_answers": list(accepted),
        "data_source": source,
        "prompt": [{"content": SEARCH_R1.format(question), "role": "user"}],
        "ability": "fact-reasoning",
        "reward_model": {"ground_truth": {"target": list(accepted)}, "style": "rule"},
        "extra_info": {"index": index, "split": "train"},
    }


def write_file(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write a file in the format of its suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def resized(name: str, num_test: int | None = None, **files: Path | int) -> Published:
    """Return a published data set with these files, or with this many rows and an impossible hash."""
    dataset = PUBLISHED[name]
    made = {}
    for part, file in dataset.files.items():
        given = files[part]
        num_rows = given if isinstance(given, int) else _num_rows(given)
        digest = "0" * 64 if isinstance(given, int) else sha256(given)
        made[part] = dataclasses.replace(file, num_rows=num_rows, sha256=digest)
    num_test = dataset.num_test if num_test is None else num_test
    return dataclasses.replace(dataset, files=made, num_test=num_test)


def _num_rows(path: Path) -> int:
    if path.suffix == ".parquet":
        return int(pq.read_metadata(path).num_rows)
    return len(path.read_bytes().splitlines())
