from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.errors import BatchError
from mrl.protocol import DataProto, RemoteColumn
from mrl.protocol.columns import from_rows, jagged


def make_batch(num_rows: int = 4, first_id: int = 0) -> DataProto:
    """Make rows with i+1 tokens of value 10*id, a score and a name."""
    ids = range(first_id, first_id + num_rows)
    return DataProto.from_dict(
        {
            "responses": from_rows([torch.full((row + 1,), 10 * row) for row in ids]),
            "scores": torch.tensor([float(row) for row in ids]),
        },
        {"uid": [f"row {row}" for row in ids]},
        meta_info={"step": 3},
        row_ids=list(ids),
    )


def rows_of(batch: DataProto) -> list[tuple[int, list[int], float, str]]:
    return [
        (int(row_id), tokens.tolist(), float(score), name)
        for row_id, tokens, score, name in zip(
            batch.row_ids, batch["responses"].rows(), batch["scores"], batch["uid"], strict=True
        )
    ]


def stored(batch: DataProto, name: str, handle: str) -> DataProto:
    """Replace one column of the batch by a reference to it."""
    rest = batch.select(*(other for other in batch.columns() if other != name))
    column = RemoteColumn.of_part(handle, len(batch), batch.lengths(name))
    return rest.union(DataProto({name: column}, batch.row_ids, {}))


def test_jagged_columns_hold_no_padding_and_ids_are_32_bit() -> None:
    batch = make_batch()
    column = batch["responses"]
    assert column.values.tolist() == [0, 10, 10, 20, 20, 20, 30, 30, 30, 30]
    assert column.values.dtype == torch.int32
    assert batch.lengths("responses").tolist() == [1, 2, 3, 4]


def test_ids_that_do_not_fit_are_refused() -> None:
    with pytest.raises(BatchError, match=r"`ids` contains 4294967296, which exceeds"):
        DataProto.from_dict({"ids": from_rows([torch.tensor([1, 2**32])])})


def test_columns_with_equal_lengths_can_be_combined() -> None:
    batch = make_batch().take([2, 0, 3, 1])
    log_probs = DataProto({"log_probs": jagged(torch.ones(10), batch.lengths("responses"))}, batch.row_ids, {})
    joined = batch.union(log_probs)
    product = joined.batch["responses"] * joined.batch["log_probs"]
    assert product.values().tolist() == joined["responses"].values.tolist()


def test_a_column_shares_the_values_it_was_made_of() -> None:
    values = torch.arange(5, dtype=torch.int32)
    batch = DataProto.from_dict({"responses": jagged(values, [2, 0, 3])}).chunk(1)[0]
    assert batch.values("responses").data_ptr() == values.data_ptr()
    assert batch.lengths("responses").tolist() == [2, 0, 3]
    assert batch.lengths("responses").dtype == np.int32
    assert batch["responses"].values.data_ptr() == values.data_ptr()
    assert batch.batch["responses"].values().data_ptr() == values.data_ptr()


@pytest.mark.slow
def test_tensordict_is_loaded_only_for_those_who_ask() -> None:
    code = (
        "import sys; from mrl.protocol import DataProto; from mrl.protocol.columns import from_rows\n"
        "batch = DataProto.from_dict({'ids': from_rows([[1], [2, 3]])}).take([1, 0]).repeat(2)\n"
        "assert batch.values('ids').tolist() == [2, 3, 2, 3, 1, 1]\n"
        "assert len(batch['ids']) == 4 and 'tensordict' not in sys.modules\n"
        "assert batch.batch['ids'].is_nested and 'tensordict' in sys.modules"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr


def test_nested_tensors_come_in_and_go_out() -> None:
    nested = torch.nested.nested_tensor([torch.arange(3), torch.arange(1)], layout=torch.jagged)
    batch = DataProto.from_dict({"ids": nested, "log_probs": jagged(torch.ones(4), [3, 1])})
    assert batch.values("ids").tolist() == [0, 1, 2, 0]
    assert batch.batch.batch_size == torch.Size([2])
    assert (batch.batch["ids"] * batch.batch["log_probs"]).values().tolist() == [0, 1, 2, 0]


def test_gaps_between_rows_are_closed() -> None:
    gaps = torch.nested.nested_tensor_from_jagged(torch.arange(10), torch.tensor([0, 3, 10]), torch.tensor([2, 4]))
    batch = DataProto.from_dict({"ids": gaps})
    assert (batch.values("ids").tolist(), batch.lengths("ids").tolist()) == ([0, 1, 3, 4, 5, 6], [2, 4])


def test_what_is_written_into_the_tensordict_counts() -> None:
    batch = make_batch()
    batch.batch["scores"] = torch.zeros(4)
    batch.batch["advantages"] = batch.batch["responses"] * 0.5
    assert batch["scores"].tolist() == [0, 0, 0, 0]
    halved = batch.take([3, 1, 2, 0])
    assert halved.values("advantages").tolist() == [15, 15, 15, 15, 5, 5, 10, 10, 10, 0]
    batch.pop("responses", "uid")
    assert list(batch.columns()) == ["scores", "advantages"]
    assert list(batch.batch.keys()) == ["scores", "advantages"]


@given(order=st.permutations(range(5)))
@settings(max_examples=25, deadline=None)
def test_take_moves_whole_rows(order: list[int]) -> None:
    batch = make_batch(5)
    assert rows_of(batch.take(order)) == [rows_of(batch)[row] for row in order]


def test_a_column_is_added_or_replaced_and_the_batch_stays_as_it_was() -> None:
    batch = make_batch()
    changed = batch.with_column("scores", batch["scores"] + 1).with_column("note", ["a", [1], None, {}])
    assert changed["scores"].tolist() == (batch["scores"] + 1).tolist()
    assert changed["note"].tolist() == ["a", [1], None, {}]
    assert set(changed.columns()) == {"responses", "scores", "uid", "note"}
    assert (changed.row_ids.tolist(), changed.meta_info) == (batch.row_ids.tolist(), batch.meta_info)
    assert rows_of(batch) == rows_of(make_batch())
    with pytest.raises(BatchError, match="column `scores` has 3 rows"):
        batch.with_column("scores", torch.zeros(3))


def test_union_matches_rows_by_id_not_by_position() -> None:
    batch = make_batch()
    scores = batch.pop("scores").take([3, 1, 0, 2])
    assert "scores" not in batch.columns()
    assert rows_of(batch.union(scores)) == rows_of(make_batch())


@given(cuts=st.lists(st.integers(0, 3), min_size=1, max_size=5))
@settings(max_examples=25, deadline=None)
def test_split_and_concat_are_inverse(cuts: list[int]) -> None:
    batch = make_batch(sum(cuts)) if sum(cuts) else make_batch(1).take([])
    pieces = batch.split(cuts)
    assert [len(piece) for piece in pieces] == cuts
    assert rows_of(DataProto.concat(pieces)) == rows_of(batch)


def test_single_dict_keeps_tensors_and_takes_all_else_as_objects() -> None:
    batch = DataProto.from_single_dict(
        {
            "scores": torch.tensor([1.0, 2.0]),
            "ids": from_rows([[1], [2, 3]]),
            "uid": np.array(["a", "b"]),
            "tag": [1, {}],
        },
        {"step": 1},
        row_ids=[5, 3],
    )
    assert [*batch.batch.keys()] == ["scores", "ids"]
    assert [*batch.non_tensor_batch] == ["uid", "tag"]
    assert batch.row_ids.tolist() == [5, 3]
    assert batch.meta_info == {"step": 1}


def test_rename_keeps_rows_and_may_exchange_names() -> None:
    batch = make_batch(3, first_id=4)
    renamed = batch.rename("scores", "rewards")
    assert [*renamed.columns()] == ["responses", "rewards", "uid"]
    assert renamed["rewards"] is batch["scores"]
    assert renamed.row_ids.tolist() == [4, 5, 6]
    assert "scores" in batch.columns()
    exchanged = batch.rename(["scores", "uid"], ["uid", "scores"])
    assert exchanged["uid"].tolist() == batch["scores"].tolist()
    assert rows_of(exchanged.rename(["scores", "uid"], ["uid", "scores"])) == rows_of(batch)


def test_rename_leaves_stored_columns_beside_it() -> None:
    batch = stored(make_batch(), "responses", "p").rename("uid", "name")
    assert "responses" in batch.stored


def test_mini_batches_go_through_every_row_of_every_epoch() -> None:
    batch = stored(make_batch(6, first_id=10), "responses", "p")
    plain = [part.row_ids.tolist() for part in batch.make_iterator(2, epochs=2)]
    assert plain == [[10, 11], [12, 13], [14, 15]] * 2
    shuffled = [part.row_ids.tolist() for part in batch.make_iterator(3, epochs=2, seed=1, shuffle=True)]
    first, second = shuffled[0] + shuffled[1], shuffled[2] + shuffled[3]
    assert sorted(first) == sorted(second) == [*range(10, 16)]
    assert first != second
    assert shuffled == [part.row_ids.tolist() for part in batch.make_iterator(3, 2, 1, shuffle=True)]


def test_operations_leave_their_input_alone() -> None:
    batch = make_batch()
    before = rows_of(batch)
    batch.repeat(2), batch.take([3, 2, 1, 0]), batch.select("scores"), batch.take([1]), batch.chunk(2)
    assert rows_of(batch) == before
    assert list(batch.columns()) == ["responses", "scores", "uid"]


def test_row_operations_on_a_stored_column_move_no_values() -> None:
    batch = stored(make_batch(4), "responses", "part a")
    other = stored(make_batch(2, first_id=4), "responses", "part b")
    mixed = DataProto.concat([batch, other]).take([5, 0, 4, 1, 2, 3])
    column = mixed.stored["responses"]
    assert column.parts == ("part a", "part b")
    assert column.part_of_row.tolist() == [1, 0, 1, 0, 0, 0]
    assert column.row_in_part.tolist() == [1, 0, 0, 1, 2, 3]
    assert mixed.lengths("responses").tolist() == [6, 1, 5, 2, 3, 4]
    beginning = mixed.take([1, 3]).stored["responses"]
    assert beginning.parts == ("part a",)
    assert beginning.row_in_part.tolist() == [0, 1]
    assert mixed.split([2, 4])[1].stored["responses"].rows_among_parts().tolist() == [4, 1, 2, 3]
    assert len(mixed.take([]).stored["responses"].parts) == 1, "no rows still have a type"
    assert not beginning.is_whole_part(), "two rows of a part of four are not the part"
    assert mixed.take([1, 3, 4, 5]).stored["responses"].is_whole_part()
    assert mixed.repeat(2).stored["responses"].parts == ("part a", "part b")


def test_a_part_whose_rows_stand_in_another_order_is_not_that_part() -> None:
    whole = stored(make_batch(3), "responses", "the part")
    assert whole.stored["responses"].is_whole_part()
    assert whole.take([0, 1, 2]).stored["responses"].is_whole_part()
    for order in ([1, 0, 2], [2, 1, 0]):
        column = whole.take(order).stored["responses"]
        assert not column.is_whole_part()
        assert column.rows_among_parts().tolist() == order
        assert column.lengths is not None
        assert column.lengths.tolist() == [row + 1 for row in order]
    twice = DataProto(whole.stored, np.arange(3), {}).repeat(2).take([0, 1, 4])
    assert not twice.stored["responses"].is_whole_part(), "as many rows as the part has, but not each of them"


def test_equal_handles_are_one_part() -> None:
    left, right = (stored(piece, "responses", "the part") for piece in make_batch(4).split([2, 2]))
    assert DataProto.concat([left, right]).stored["responses"].parts == ("the part",)


def test_empty_rows_and_empty_batches_are_rows_too() -> None:
    batch = DataProto.from_dict({"responses": from_rows([[], [1, 2], []])})
    assert batch.take([1, 0, 2]).lengths("responses").tolist() == [2, 0, 0]
    assert len(batch.take([])) == 0
    assert batch.take([2, 0]).lengths("responses").tolist() == [0, 0]


def test_empty_rows_change_no_type() -> None:
    assert from_rows([[], [0.5]]).values.dtype == torch.float32
    assert from_rows([[], [1]]).values.dtype == torch.int64


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: DataProto.from_dict({"a": torch.zeros(3), "b": torch.zeros(2)}),
            "column `b` has 2 rows (dense float32, 2 rows), but `a` have 3",
        ),
        (lambda: jagged(torch.zeros(5), [2, 2]), "the row lengths sum to 4, but there are 5 values"),
        (lambda: make_batch()["respones"], 'no column `respones`\n  fix: did you mean "responses"?'),
        (
            lambda: make_batch().union(make_batch()),
            "both batches have a column `responses`: jagged int32, 4 rows, 10 values",
        ),
        (
            lambda: make_batch().select("scores").union(make_batch(4, first_id=2).select("uid")),
            "different rows: 2 ids are missing [0, 1], 2 are not expected [4, 5]",
        ),
        (lambda: make_batch().take([4]), "row 4 does not exist: there are 4 rows"),
        (lambda: make_batch().split([1, 2]), "the sizes [1, 2] sum to 3, but there are 4 rows"),
        (lambda: make_batch().chunk(5), "4 rows cannot be split into 5 shards: each needs at least one row"),
        (
            lambda: DataProto.from_single_dict({"a": torch.zeros(2), "temperature": 1.0}),  # type: ignore[dict-item]
            "column `temperature` is a float, not one value per row\n  fix: pass a tensor",
        ),
        (lambda: make_batch().rename("scores", ["x", "y"]), "1 columns cannot get 2 names: ['scores'] and ['x', 'y']"),
        (
            lambda: make_batch().rename("scores", "uid"),
            'two columns would have the name `uid`\n  fix: pop("uid") first',
        ),
        (
            lambda: stored(make_batch(), "responses", "p").rename("responses", "x"),
            "column `responses` is not local (stored, 4 rows, 10 values in 1 parts) and cannot be renamed",
        ),
        (lambda: make_batch().make_iterator(3, 1), "4 rows cannot be divided into mini-batches of 3 over 1 epochs"),
        (lambda: make_batch().make_iterator(2, 1, shuffle=True), "shuffled mini-batches need a seed"),
        (lambda: make_batch().repeat(0), "rows cannot be repeated 0 times"),
        (lambda: DataProto.concat([]), "nothing to concatenate"),
        (lambda: DataProto.concat([make_batch(), make_batch()]), "some rows are in more than one batch"),
        (
            lambda: DataProto.concat([make_batch(2), make_batch(2, first_id=2).select("uid")]),
            "batches 0 and 1 have different columns: only one of them has `responses`, `scores`",
        ),
        (
            lambda: DataProto.concat(
                [DataProto.from_dict({"a": torch.zeros(1)}), DataProto.from_dict({"a": torch.zeros(1, 2)}, row_ids=[1])]
            ),
            "column `a` cannot be concatenated: its parts are dense float32 and dense float32[2]",
        ),
        (
            lambda: DataProto.from_dict({"a": torch.zeros(2)}, row_ids=[7, 7]),
            "row ids must be unique; duplicates: [7]",
        ),
        (
            lambda: stored(make_batch(), "responses", "p")["responses"],
            "column `responses` is not local (stored, 4 rows, 10 values in 1 parts)",
        ),
        (
            lambda: DataProto.concat([stored(make_batch(2), "responses", "p"), make_batch(2, first_id=2)]),
            "column `responses` is stored in one batch and local in another",
        ),
        (
            lambda: make_batch().lengths("scores"),
            "only jagged columns have row lengths and values; `scores` is dense float32, 4 rows",
        ),
        (
            lambda: DataProto.from_dict({"a": torch.nested.nested_tensor([torch.ones(1)], layout=torch.strided)}),
            "column `a` is nested, but not jagged\n  fix: make it with layout=torch.jagged",
        ),
        (
            lambda: DataProto.concat(
                [make_batch(1), DataProto(make_batch(1, first_id=1).columns(), np.array([1]), {"step": 4})]
            ),
            "meta_info `step` differs between batches: 3 and 4",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # the strided ones, which are refused here
def test_mistakes_name_column_shapes_and_fix(make: object, message: str) -> None:
    with pytest.raises(BatchError) as caught:
        make()  # type: ignore[operator]
    assert message in str(caught.value)
