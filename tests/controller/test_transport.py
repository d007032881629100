"""Columns sent to a shard and returned, without Ray: each arrives unchanged, for any division of the rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from ray.exceptions import ObjectStoreFullError

from mrl.controller import transport
from mrl.controller.transport import ColumnStore, assemble_shard, pack_result, plan_shard, unpack_result
from mrl.errors import BatchError, SetupError, WireError
from mrl.protocol import DataProto, RemoteColumn
from mrl.protocol.columns import Jagged, from_rows
from mrl.protocol.wire import encode

ROWS = [[1, 2, 3], [4], [], [5, 6]]


def answer_of(number: int) -> DataProto:
    """Return a worker's result whose rows show which part they belong to."""
    return DataProto.from_dict(
        {
            "responses": from_rows([[10 * number + token for token in row] for row in ROWS]),
            "scores": torch.arange(4) + 10.0 * number,
            "hidden": torch.arange(8).reshape(4, 2) + 10.0 * number,
        },
        {"uid": [f"{number}/{row}" for row in range(4)]},
        meta_info={"rank": number},
        row_ids=np.arange(4) + 4 * number,
    )


WRITES = ("responses", "scores", "hidden", "uid")


def stored(num_parts: int) -> tuple[DataProto, dict[str, ColumnStore]]:
    """Return the results of several workers as the driver has them, and the stored columns."""
    bundles: dict[str, ColumnStore] = {}
    batches = []
    for number in range(num_parts):
        made = answer_of(number)
        answer, bundles[f"part {number}"] = pack_result(made, made.row_ids, WRITES, "generate")
        batch = unpack_result(answer, f"part {number}", made.row_ids)  # type: ignore[arg-type]
        assert batch.meta_info == {"rank": number}
        batch.meta_info = {}
        batches.append(batch)
    return DataProto.concat(batches), bundles


def plain(batch: DataProto) -> dict[str, list[Any]]:
    """Return every column as lists."""
    found: dict[str, list[Any]] = {"row_ids": batch.row_ids.tolist()}
    for name, column in batch.columns().items():
        found[name] = [row.tolist() for row in column.rows()] if isinstance(column, Jagged) else column.tolist()  # type: ignore[union-attr]
    return found


def test_numbers_per_row_come_to_the_driver_and_the_rest_stays() -> None:
    batch, bundles = stored(2)
    assert batch["scores"].tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    assert set(batch.stored) == {"responses", "hidden", "uid"}
    assert all(set(bundle) == {"responses", "hidden", "uid"} for bundle in bundles.values())
    assert batch.lengths("responses").tolist() == [3, 1, 0, 2] * 2
    assert batch.stored["hidden"].lengths is None


@pytest.mark.parametrize(
    "order",
    [
        [0, 1, 2, 3],
        [1, 0, 2, 3],
        [5, 4, 7, 6],
        [7, 0, 3, 4],
        [4, 5, 6, 7, 0, 1, 2, 3],
        [],
    ],
    ids=str,
)
def test_rows_arrive_in_the_order_that_they_were_brought_into(order: list[int]) -> None:
    batch, bundles = stored(2)
    whole = plain(DataProto.concat([_without_meta(answer_of(number)) for number in range(2)]))
    shard = batch.take(order)
    shard.meta_info = {"step": 5}
    plan, references = plan_shard(shard, ["responses", "uid", "hidden", "scores"])
    assert len(set(references)) == len(references), "an object is sent once"
    found = assemble_shard(plan, [bundles[str(part)] for part in references])
    assert found.meta_info == {"step": 5}
    assert plain(found) == {name: [values[row] for row in order] for name, values in whole.items()}


def test_only_what_is_read_is_sent() -> None:
    batch, _ = stored(1)
    plan, references = plan_shard(batch, ["scores"])
    assert (set(plan[2]), references) == ({"scores"}, [])


def test_large_columns_are_stored_once_and_small_ones_ride_along(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[ColumnStore] = []

    def put(bundle: ColumnStore) -> str:
        kept.append(bundle)
        return f"put {len(kept)}"

    monkeypatch.setattr(transport.ray, "put", put)
    batch = _without_meta(answer_of(0))
    names = ["responses", "uid", "hidden", "scores"]
    sizes = {name: encode(batch[name], name).nbytes for name in names}
    edge = sorted(sizes.values())[1]
    monkeypatch.setattr(transport, "_INLINE_BYTES", edge)
    plan, references = plan_shard(batch, names)
    (bundle,) = kept
    assert references == ["put 1"]
    assert set(bundle) == {name for name in names if sizes[name] > edge}
    assert 0 < len(bundle) < len(names)
    assert plain(assemble_shard(plan, kept)) == plain(batch)


def test_a_stored_batch_is_the_same_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[ColumnStore] = []

    def put(bundle: ColumnStore) -> str:
        kept.append(bundle)
        return "put"

    monkeypatch.setattr(transport.ray, "put", put)
    monkeypatch.setattr(transport.ray, "get", lambda references, timeout: kept)
    batch = answer_of(0)
    stored = transport.store(batch)
    assert stored.meta_info == batch.meta_info != {}
    fetched = transport.fetch(stored, 1.0)
    assert fetched.row_ids.tolist() == batch.row_ids.tolist()
    assert plain(_without_meta(fetched)) == plain(_without_meta(batch))


def test_an_answer_is_what_was_promised_for_the_rows_that_were_given() -> None:
    made = answer_of(1)
    with pytest.raises(BatchError, match=r"generate declares .*; missing \['scores'\]"):
        pack_result(made.select("responses", "hidden", "uid"), made.row_ids, WRITES, "generate")
    with pytest.raises(BatchError, match=r"; undeclared \['uid'\]"):
        pack_result(made, made.row_ids, WRITES[:-1], "generate")
    with pytest.raises(BatchError, match="generate returned different rows from its input"):
        pack_result(made.take([1, 0, 2, 3]), made.row_ids, WRITES, "generate")


def test_a_plan_of_another_shape_is_refused() -> None:
    with pytest.raises(WireError, match="not a column plan"):
        assemble_shard([np.arange(1).tobytes(), {}, {"x": [1, 2, 3]}], [])


def test_parts_that_columns_share_are_sent_once() -> None:
    batch, bundles = stored(3)
    shard = batch.take([9, 0, 5])
    plan, references = plan_shard(shard, ["uid", "responses"])
    assert sorted(map(str, references)) == ["part 0", "part 1", "part 2"]
    found = assemble_shard(plan, [bundles[str(part)] for part in references])
    assert found["uid"].tolist() == ["2/1", "0/0", "1/1"]
    assert isinstance(shard.stored["uid"], RemoteColumn)


def _without_meta(batch: DataProto) -> DataProto:
    batch.meta_info = {}
    return batch


def test_an_object_store_without_room_is_named_with_what_was_to_go_into_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(columns: ColumnStore) -> None:
        raise ObjectStoreFullError("no room")

    monkeypatch.setattr(transport.ray, "put", full)
    batch = DataProto.from_dict({"hidden": torch.zeros(4, 1 << 18), "scores": torch.zeros(4)}, {})
    with pytest.raises(SetupError, match=r"is full: 4\.0 MiB of hidden do not fit.*ObjectStoreFullError"):
        transport.store(batch)
