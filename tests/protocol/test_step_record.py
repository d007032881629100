"""The files of a recorded step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mrl.errors import SetupError
from mrl.protocol import DataProto
from mrl.protocol.step_record import (
    AFTER,
    BEFORE,
    Moment,
    Placed,
    StepRecord,
    TensorPrint,
    finite,
    recorded_bytes,
    recorded_steps,
    write_record,
)

PRINTS: list[Placed] = [
    ("actor", BEFORE, 0, TensorPrint("weight", "a", 3, -(1 << 63), 2.5, (1.0,) * 16, True)),
    ("actor", Moment(1, 1), 2, TensorPrint("gradient", "a", 3, (1 << 63) - 1, 1e-300, (-1e300,) * 16, False)),
    ("critic", AFTER, 1, TensorPrint("exp_avg", "b", 0, 7, float("inf"), (0.0,) * 16, True)),
]


def batch(rows: int = 2, **facts: object) -> DataProto:
    return DataProto.from_dict({"scores": torch.arange(rows)}, meta_info=facts)


def test_a_record_comes_back(tmp_path: Path) -> None:
    size = write_record(tmp_path, 7, batch(3), batch(step=7), PRINTS, 1 << 30)
    record = StepRecord.read(tmp_path, 7)
    assert record.prints == PRINTS
    assert record.samples["scores"].tolist() == [0, 1, 2]
    assert record.facts["step"] == 7
    assert recorded_bytes(tmp_path) == size


def test_a_repeated_step_replaces_its_record_and_leftovers_are_removed(tmp_path: Path) -> None:
    write_record(tmp_path, 7, batch(), batch(step=7, attempt=1), PRINTS, 1 << 30)
    (tmp_path / "record" / ".step-000008").mkdir()
    write_record(tmp_path, 7, batch(), batch(step=7, attempt=2), PRINTS[:1], 1 << 30)
    assert StepRecord.read(tmp_path, 7).facts["attempt"] == 2
    assert [path.name for path in (tmp_path / "record").iterdir()] == ["step-000007"]


def test_a_record_beyond_the_limit_leaves_nothing(tmp_path: Path) -> None:
    size = write_record(tmp_path, 1, batch(), batch(), PRINTS, 1 << 30)
    assert write_record(tmp_path, 2, batch(), batch(), PRINTS, 2 * size - 1) == 0
    assert recorded_steps(tmp_path) == [1]
    assert recorded_bytes(tmp_path) == size
    assert write_record(tmp_path, 2, batch(), batch(), PRINTS, 2 * size) == size


def test_another_format_is_refused(tmp_path: Path) -> None:
    write_record(tmp_path, 1, batch(), batch(), PRINTS, 1 << 30)
    path = tmp_path / "record" / "step-000001" / "batch.mrl"
    path.unlink()
    batch(format="mrl-record-9").save_to_disk(path)
    with pytest.raises(SetupError, match="this record has the format 'mrl-record-9', not 'mrl-record-1'"):
        StepRecord.read(tmp_path, 1)


def test_numbers_that_are_not_finite_become_text() -> None:
    facts = {"a": [1.5, float("nan")], "b": {"c": float("-inf"), 3: None}}
    assert finite(facts) == {"a": [1.5, "nan"], "b": {"c": "-inf", "3": None}}
