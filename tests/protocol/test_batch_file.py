"""Batches are read back from disk unchanged, and a damaged file raises an error."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from mrl.errors import BatchError, WireError
from mrl.protocol import DataProto
from tests.fuzzing import damaged
from tests.protocol.test_data_proto import make_batch, rows_of, stored


def test_batch_comes_back_with_row_ids_and_meta_info(tmp_path: Path) -> None:
    batch = make_batch(4, first_id=7).with_column("mask", torch.tensor([[True], [False], [True], [True]])).take([2, 0])
    batch.save_to_disk(tmp_path / "batch")
    found = DataProto.load_from_disk(str(tmp_path / "batch"))
    assert rows_of(found) == rows_of(batch)
    assert found.row_ids.tolist() == [9, 7]
    assert found.meta_info == {"step": 3}
    assert found["mask"].tolist() == [[True], [True]]
    assert list(found.columns()) == list(batch.columns())


def test_empty_batch_comes_back(tmp_path: Path) -> None:
    make_batch().take([]).save_to_disk(tmp_path / "batch")
    assert rows_of(DataProto.load_from_disk(tmp_path / "batch")) == []


def test_file_that_is_damaged_anywhere_is_refused(tmp_path: Path) -> None:
    file, chance = tmp_path / "batch", Random(0)
    make_batch(8).save_to_disk(file)
    whole = file.read_bytes()
    flipped = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(0, len(whole), 7)]
    for content in [*flipped, whole[:-1], whole + b"\0", b"", *(damaged(whole, chance) for _ in range(50))]:
        if content == whole:
            continue
        file.write_bytes(content)
        with pytest.raises(WireError, match=r"(damaged|not a batch).*(.|\n)*fix: .*save_to_disk"):
            DataProto.load_from_disk(file)


def test_missing_file_and_directory_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(WireError, match="cannot read the batch"):
            DataProto.load_from_disk(path)
    with pytest.raises(BatchError, match="cannot write"):
        make_batch().save_to_disk(tmp_path / "none" / "batch")


@pytest.mark.parametrize("value", [(1, 2), {1: 2}, object(), np.float32(1), float("nan")])
def test_meta_info_that_would_change_on_disk_is_refused(value: object, tmp_path: Path) -> None:
    batch = make_batch()
    batch.meta_info["value"] = value
    with pytest.raises(BatchError, match="meta_info is not JSON"):
        batch.save_to_disk(tmp_path / "batch")
    assert not (tmp_path / "batch").exists()


def test_stored_column_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(BatchError, match=r"column `responses` is not local .* cannot be written\n  fix: fetch"):
        stored(make_batch(), "responses", "p").save_to_disk(tmp_path / "batch")
