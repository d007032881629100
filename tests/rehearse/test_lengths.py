"""Recorded lengths: the fullest micro-batch of all steps, packed as a run packs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mrl.cli.rehearse import recorded_routing
from mrl.data.packing import PackingRules, RowCost
from mrl.data.row_files import write_samples
from mrl.errors import ConfigError, DataError
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


def test_the_routing_of_a_run_is_that_of_its_worst_update(tmp_path: Path) -> None:
    lines = [{"step": 0}, *({"step": step, "actor/experts/busiest_rank": 1 + step / 10} for step in (1, 3, 2))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert recorded_routing(str(tmp_path)) == 1.3
    assert (recorded_routing("2.5"), recorded_routing(None)) == (2.5, None)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "actor/grad_norm": 1.0}) + "\n")
    with pytest.raises(ConfigError, match="no step of the run recorded actor/experts/busiest_rank"):
        recorded_routing(str(tmp_path))
