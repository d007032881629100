"""Edge cases of columns: 32-bit ids, views and copies, slices, empty rows, and rows from several parts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mrl.errors import BatchError
from mrl.protocol import DataProto, RemoteColumn
from mrl.protocol.columns import (
    Jagged,
    compact,
    concat,
    describe,
    from_rows,
    gather,
    jagged,
    object_array,
    signature,
    take,
)
from mrl.protocol.wire import Wire, decode, encode


def rows(column: object) -> list[list[float]]:
    assert isinstance(column, Jagged)
    return [row.tolist() for row in column.rows()]


@pytest.mark.parametrize("value", [2**31 - 1, -(2**31)])
def test_ids_up_to_the_edge_of_32_bits_are_kept(value: int) -> None:
    column = compact(from_rows([torch.tensor([1, value]), torch.tensor([], dtype=torch.int64)]), "ids")
    assert isinstance(column, Jagged)
    assert column.values.dtype == torch.int32
    assert rows(column) == [[1, value], []]
    beyond = value + (1 if value > 0 else -1)
    with pytest.raises(BatchError, match=rf"column `ids` contains {abs(beyond)}, which exceeds"):
        compact(from_rows([torch.tensor([beyond])]), "ids")


def test_only_jagged_columns_of_whole_numbers_are_made_smaller() -> None:
    assert compact(torch.tensor([2**40]), "x").dtype == torch.int64  # type: ignore[union-attr]
    floats = jagged(torch.ones(2, dtype=torch.float64), [2])
    assert compact(floats, "x") is floats


@pytest.mark.parametrize(
    "column",
    [jagged(torch.arange(6), [2, 0, 3, 1]), torch.arange(8).view(4, 2), object_array(["a", [1], None, {}])],
    ids=["jagged", "dense", "objects"],
)
def test_a_slice_is_what_the_same_rows_are_one_by_one(column: object) -> None:
    for begin in range(5):
        for end in range(begin, 5):
            cut = take(column, slice(begin, end))  # type: ignore[arg-type]
            picked = take(column, np.arange(begin, end))  # type: ignore[arg-type]
            assert len(cut) == len(picked) == end - begin
            assert plain(cut) == plain(picked)
    assert plain(take(column, np.array([3, 1, 1]))) == [plain(column)[row] for row in (3, 1, 1)]  # type: ignore[arg-type]


def plain(column: object) -> list[object]:
    return rows(column) if isinstance(column, Jagged) else column.tolist()  # type: ignore[attr-defined, return-value]


def test_slices_are_views_and_other_rows_are_copies() -> None:
    column = jagged(torch.arange(6), [2, 0, 3, 1])
    cut = take(column, slice(2, 4))
    assert isinstance(cut, Jagged)
    assert cut.values.data_ptr() == column.values[2:].data_ptr()
    copied = take(column, np.array([2, 3]))
    assert isinstance(copied, Jagged)
    assert copied.values.data_ptr() != column.values[2:].data_ptr()


def test_rows_are_gathered_from_parts_of_any_kind() -> None:
    dense = [torch.arange(2).float(), torch.arange(2, 5).float()]
    assert gather(dense, np.array([4, 0, 4]), "x").tolist() == [4, 0, 4]
    objects = [object_array(["a"]), object_array(["b", ["c"]])]
    assert gather(objects, np.array([2, 0]), "x").tolist() == [["c"], "a"]
    parts = [jagged(torch.arange(3), [1, 2]), jagged(torch.arange(3, 6), [0, 3])]
    assert rows(gather(parts, np.array([3, 2, 0, 1, 3]), "x")) == [[3, 4, 5], [], [0], [1, 2], [3, 4, 5]]
    none = gather(parts, np.array([], dtype=np.int64), "x")
    assert isinstance(none, Jagged)
    assert (len(none), none.values.dtype) == (0, torch.int64)


def test_columns_are_joined_in_their_order() -> None:
    assert rows(concat([jagged(torch.arange(2), [2]), jagged(torch.arange(2, 3), [0, 1])], "x")) == [[0, 1], [], [2]]
    assert concat([torch.ones(1), torch.zeros(2)], "x").tolist() == [1, 0, 0]
    assert concat([object_array([1]), object_array([[2]])], "x").tolist() == [1, [2]]


def test_columns_in_words() -> None:
    assert signature(jagged(torch.zeros(3, 2), [3])) == "jagged float32[2]"
    assert describe(jagged(torch.zeros(3), [1, 2])) == "jagged float32, 2 rows, 3 values"
    assert describe(torch.zeros(2, 4)) == "dense float32[4], 2 rows"
    assert describe(object_array([1])) == "objects, 1 rows"
    remote = RemoteColumn.of_part("p", 2, np.array([1, 4], dtype=np.int32))
    assert remote.describe() == "stored, 2 rows, 5 values in 1 parts"
    assert RemoteColumn.of_part("p", 2, None).describe() == "stored, 2 rows in 1 parts"


def test_rows_are_counted_from_the_end_too_but_not_beyond() -> None:
    batch = DataProto.from_dict({"x": torch.arange(4)}, row_ids=[5, 6, 7, 8])
    assert batch.take([-1, 0]).row_ids.tolist() == [8, 5]
    for wrong in (4, -5):
        with pytest.raises(BatchError, match="there are 4 rows"):
            batch.take([wrong])


def test_what_is_said_about_a_batch_stays_with_its_pieces() -> None:
    batch = DataProto.from_dict({"x": torch.arange(4)}, meta_info={"step": 3}, row_ids=[9, 7, 5, 3])
    pieces = [batch.take([1]), batch.take([3, 2, 1, 0]), batch.select("x"), *batch.split([1, 3]), batch.repeat(2)]
    assert all(piece.meta_info == {"step": 3} for piece in pieces)
    pieces[0].meta_info["step"] = 4
    assert batch.meta_info == {"step": 3}, "each piece has its own dictionary"
    assert [piece.row_ids.tolist() for piece in batch.chunk(3)] == [[9, 7], [5], [3]]
    assert batch.repeat(2).row_ids.tolist() == [18, 19, 14, 15, 10, 11, 6, 7]
    popped = DataProto.from_dict({"x": torch.arange(2), "y": torch.arange(2)}, row_ids=[4, 2])
    taken = popped.pop("x")
    assert (list(popped.columns()), list(taken.columns()), taken.row_ids.tolist()) == (["y"], ["x"], [4, 2])


def test_words_about_batches_are_put_together_where_they_agree() -> None:
    left = DataProto.from_dict({"x": torch.arange(1)}, meta_info={"a": 1, "both": 2})
    right = DataProto.from_dict({"y": torch.arange(1)}, meta_info={"b": 3, "both": 2})
    assert left.union(right).meta_info == {"a": 1, "both": 2, "b": 3}


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_a_mask_with_holes_travels_as_it_is(dtype: torch.dtype) -> None:
    column = jagged(torch.tensor([1, 0, 1, 1]).to(dtype), [3, 0, 1])
    wire = encode(column, "mask")
    assert len(wire.body) == 4
    found = decode(wire)
    assert rows(found) == rows(column)
    whole = encode(jagged(torch.ones(4).to(dtype), [3, 0, 1]), "mask")
    assert len(whole.body) == (0 if dtype is torch.bool else 4)
    assert rows(decode(whole)) == [[1, 1, 1], [], [1]]


def test_columns_that_share_no_contiguous_memory_travel_too() -> None:
    column = torch.arange(12).view(3, 4).t()
    found = decode(encode(column, "x"))
    assert isinstance(found, torch.Tensor)
    assert torch.equal(found, column)
    assert Wire(b"abc", b"de").nbytes == 5


def test_joined_columns_find_their_rows_whatever_parts_they_share() -> None:
    """Each column numbers its parts in its own order."""

    def column(*places: tuple[str, int]) -> RemoteColumn:
        parts = list(dict.fromkeys(part for part, _ in places))
        return RemoteColumn(
            tuple(parts),
            tuple(5 for _ in parts),
            np.array([parts.index(part) for part, _ in places], dtype=np.int32),
            np.array([row for _, row in places], dtype=np.int32),
            None,
        )

    rows = [[("p", 1), ("q", 0)], [("q", 3), ("p", 2), ("q", 4)], [("r", 0), ("q", 1)], []]
    joined = RemoteColumn.concat([column(*each) for each in rows])
    found = [(joined.parts[part], row) for part, row in zip(joined.part_of_row, joined.row_in_part, strict=True)]
    assert found == [place for each in rows for place in each]
    assert sorted(joined.parts) == ["p", "q", "r"]
