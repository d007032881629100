"""Samples of a step on disk: whole, private, and read newest first."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from mrl.data.row_files import read_newest_samples, write_samples
from mrl.errors import DataError


def test_a_step_is_one_file_with_a_row_per_sample(tmp_path: Path) -> None:
    directory = tmp_path / "samples"
    path = write_samples(directory, 12, {"response": ("a", "b"), "score": [1.0, None]})
    assert path == directory / "step-000012.parquet"
    assert [file.name for file in directory.iterdir()] == [path.name], "nothing half written is left"
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_newest_samples(directory, 5) == [{"response": "a", "score": 1.0}, {"response": "b", "score": None}]


def test_the_newest_is_that_of_the_last_step_and_is_written_over(tmp_path: Path) -> None:
    assert read_newest_samples(tmp_path, 3) == []
    for step, text in ((9, "nine"), (10, "ten"), (2, "two"), (10, "ten again")):
        write_samples(tmp_path, step, {"response": [text] * 4})
    assert read_newest_samples(tmp_path, 3) == [{"response": "ten again"}] * 3
    (tmp_path / "step-000011.tmp").write_bytes(b"half")
    assert len(read_newest_samples(tmp_path, 3)) == 3
    write_samples(tmp_path, 7, {"response": ["of validation"]}, "validation")
    assert read_newest_samples(tmp_path, 3) == [{"response": "ten again"}] * 3
    assert read_newest_samples(tmp_path, 3, "validation") == [{"response": "of validation"}]


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "step-000001.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match=r"step-000001\.parquet: the samples cannot be read"):
        read_newest_samples(tmp_path, 3)
