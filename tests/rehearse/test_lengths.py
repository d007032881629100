"""Recorded lengths: the fullest micro-batch of all steps, packed as a run packs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.data.packing import PackingRules, RowCost
from mrl.data.row_files import write_samples
from mrl.errors import DataError
from mrl.rehearse.batches import RowLengths
from mrl.rehearse.lengths import fullest

RULES = PackingRules(RowCost(1.0, 0.0))


def record(run: Path, step: int, prompts: list[int], responses: list[int]) -> None:
    write_samples(run / "samples", step, {"prompt_tokens": prompts, "response_tokens": responses})


def test_the_fullest_micro_batch_of_all_steps_is_found(tmp_path: Path) -> None:
    record(tmp_path, 1, [10, 10, 10, 10], [20, 20, 20, 20])  # two rows of 30 fit into 64 tokens
    record(tmp_path, 2, [1, 3, 1], [62, 20, 20])
    most = fullest(tmp_path, num_ranks=2, max_tokens=64, rules=RULES)
    assert most.file == "step-000002.parquet"
    assert most.rows == [RowLengths(1, 62)]
    assert str(most) == "1 row with 63 tokens, the fullest micro-batch of step-000002.parquet"


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (None, "no recorded samples"),
        ({"num_tokens": [3]}, "prompt_tokens"),
    ],
    ids=["no samples", "samples without lengths"],
)
def test_samples_without_lengths_are_refused(
    columns: dict[str, list[int]] | None, message: str, tmp_path: Path
) -> None:
    if columns is not None:
        write_samples(tmp_path / "samples", 1, columns)
    with pytest.raises(DataError, match=message) as raised:
        fullest(tmp_path, 1, 64, RULES)
    assert "response_tokens" in raised.value.fix
