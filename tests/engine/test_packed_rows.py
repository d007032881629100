"""Rows are packed into a micro-batch, split among ranks, and restored: no token is lost, moved or scored twice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mrl.engine.packed_params import packed_params
from mrl.engine.packed_rows import MicroBatch, SequenceSharding, TokenRows, concat, pack
from mrl.errors import BatchError

CPU = torch.device("cpu")


def rows_of(lengths: list[int], responses: list[int], before: bool = True) -> TokenRows:
    """Return rows whose tokens are all different, and a column with the index of each response token."""
    column = torch.arange(sum(responses)) * 10
    tokens = torch.arange(100, 100 + sum(lengths))
    return TokenRows(tokens, np.array(lengths, np.int64), np.array(responses, np.int64), {"number": column}, before)


@pytest.mark.parametrize(
    ("cut", "row_multiple", "pack_multiple"),
    [
        (SequenceSharding(), 1, 1),
        (SequenceSharding(1, 0, 2), 1, 2),
        (SequenceSharding(1, 0, 8), 1, 8),
        (SequenceSharding(2, 0, 1), 4, 4),
        (SequenceSharding(2, 1, 2), 4, 4),
        (SequenceSharding(2, 0, 4), 4, 8),
        (SequenceSharding(2, 1, 8), 4, 16),
        (SequenceSharding(3, 2, 1), 6, 6),
        (SequenceSharding(3, 0, 4), 6, 12),
        (SequenceSharding(4, 0, 4), 8, 16),
    ],
    ids=str,
)
def test_a_row_divides_into_two_pieces_a_rank_and_the_whole_among_tensor_ranks(
    cut: SequenceSharding, row_multiple: int, pack_multiple: int
) -> None:
    assert (cut.row_multiple, cut.pack_multiple) == (row_multiple, pack_multiple)


BATCHES = [
    ([1], [0]),
    ([5], [4]),
    ([9, 14, 5, 20, 7], [3, 13, 0, 1, 6]),
    ([4, 8, 4], [2, 2, 3]),
    ([1, 1, 2], [0, 0, 1]),
    ([], []),
]


def sharing(rows: TokenRows, cp: int, parts: int) -> list[MicroBatch]:
    return [pack(rows, SequenceSharding(cp, rank, parts), CPU) for rank in range(cp)]


@pytest.mark.parametrize(
    ("cp", "parts", "before"), [(1, 1, True), (1, 4, False), (2, 1, False), (2, 4, True), (3, 2, True)]
)
@pytest.mark.parametrize(("lengths", "responses"), BATCHES, ids=str)
def test_every_response_token_is_scored_once_where_it_is_to_be(
    lengths: list[int], responses: list[int], cp: int, parts: int, before: bool
) -> None:
    rows = rows_of(lengths, responses, before)
    ends = np.cumsum(lengths).astype(int)
    answers = [
        place for end, num in zip(ends, responses, strict=True) for place in range(end - num, end)
    ]  # among the rows' own tokens
    found: dict[int, tuple[int, int]] = {}
    for batch in sharing(rows, cp, parts):
        assert len(batch.score_at) == len(batch.score_to) == len(batch.labels)
        assert batch.num_scores == sum(responses)
        at = batch.tokens[0, batch.score_at]
        for number, token, label in zip(batch.score_to.tolist(), at.tolist(), batch.labels.tolist(), strict=True):
            assert number not in found, "scored by two ranks"
            found[number] = token, label
    expected = {number: (100 + place - before, 100 + place) for number, place in enumerate(answers)}
    assert found == expected


@pytest.mark.parametrize(("cp", "parts"), [(1, 1), (1, 4), (2, 1), (2, 4), (3, 2), (2, 8)])
@pytest.mark.parametrize(("lengths", "responses"), BATCHES, ids=str)
def test_ranks_share_the_tokens_evenly_and_hold_all_of_them(
    lengths: list[int], responses: list[int], cp: int, parts: int
) -> None:
    batches = sharing(rows_of(lengths, responses), cp, parts)
    sizes = {batch.tokens.shape for batch in batches}
    assert len(sizes) == 1
    ((batch_size, here),) = sizes
    assert batch_size == 1
    assert here % parts == 0
    assert here > 0
    tokens = torch.cat([batch.tokens[0] for batch in batches])
    assert sorted(tokens[tokens > 0].tolist()) == list(range(100, 100 + sum(lengths)))
    row_multiple = SequenceSharding(cp, 0, parts).row_multiple
    for batch in batches:
        ends = batch.ends
        assert ends.dtype == torch.int32
        assert torch.equal(ends, packed_params(batch).cu_seqlens_q)
        assert torch.equal(ends, packed_params(batch).cu_seqlens_kv)
        assert ends[0] == 0
        assert ends[-1] == here * cp
        stored = ends.diff().tolist()
        wanted = [-(-length // row_multiple) * row_multiple for length in lengths]
        assert stored[: len(lengths)] == wanted
        assert len(stored) <= len(lengths) + 1
        assert sum(stored) - sum(wanted) < SequenceSharding(cp, 0, parts).pack_multiple or not lengths
        assert packed_params(batch).max_seqlen_q == packed_params(batch).max_seqlen_kv == max(stored)
        assert packed_params(batch).qkv_format == "thd"
        assert packed_params(batch).segments is batch.segments
        assert batch.segments.query_lengths.sum() == here


def test_a_row_lies_as_its_rank_and_the_mirror_image_of_it() -> None:
    rows = rows_of([8, 3], [1, 1])
    first, second = (batch.tokens[0].tolist() for batch in sharing(rows, 2, 1))
    assert first == [100, 101, 106, 107, 108, 0]
    assert second == [102, 103, 104, 105, 109, 110]


def test_what_fits_gets_no_row_of_padding() -> None:
    assert pack(rows_of([4, 4], [1, 1]), SequenceSharding(1, 0, 4), CPU).ends.tolist() == [0, 4, 8]
    assert pack(rows_of([4, 3], [1, 1]), SequenceSharding(1, 0, 4), CPU).ends.tolist() == [0, 4, 7, 8]
    assert pack(rows_of([], []), SequenceSharding(2, 0, 4), CPU).ends.tolist() == [0, 8]


def test_rows_are_taken_in_the_order_that_is_asked_for_with_what_is_theirs() -> None:
    taken = rows_of([2, 4, 3], [1, 3, 2], before=False).take([2, 0, 2])
    assert taken.tokens.tolist() == [106, 107, 108, 100, 101, 106, 107, 108]
    assert taken.lengths.tolist() == [3, 2, 3]
    assert taken.response_lengths.tolist() == [2, 1, 2]
    assert taken.columns["number"].tolist() == [40, 50, 0, 40, 50]
    assert taken.before is False
    nothing = rows_of([2, 4], [1, 3]).take([])
    assert (len(nothing.lengths), nothing.tokens.numel(), len(nothing.columns["number"])) == (0, 0, 0)


@pytest.mark.parametrize("cut_into", [[[0, 1, 2, 3, 4]], [[4, 0], [2], [], [3, 1]], [[1], [0], [3], [2], [4]]], ids=str)
def test_values_of_micro_batches_come_back_in_row_order(cut_into: list[list[int]]) -> None:
    rows = rows_of([2, 4, 3, 9, 1], [1, 3, 0, 5, 0])
    parts = [rows.take(np.array(index, np.int64)).columns["number"] for index in cut_into]
    assert concat(parts, cut_into, rows.response_lengths).tolist() == rows.columns["number"].tolist()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tokens": torch.zeros(8)},
            "3 rows have 9 tokens by their lengths, but there are 8 tokens and 3 response lengths",
        ),
        (
            {"response_lengths": np.array([1, 3])},
            "3 rows have 9 tokens by their lengths, but there are 9 tokens and 2 response lengths",
        ),
        ({"response_lengths": np.array([1, 4, 1])}, "row 1 has 4 response tokens, but 4 tokens in total"),
        ({"response_lengths": np.array([1, 3, -1])}, "row 2 has -1 response tokens, but 3 tokens in total"),
        ({"columns": {"kl": torch.zeros(5)}}, "column `kl` has 5 values for 6 response tokens"),
        ({"columns": {"kl": torch.zeros(9)}}, "column `kl` has 9 values for 6 response tokens"),
    ],
    ids=str,
)
def test_rows_that_do_not_agree_with_themselves_are_refused(changes: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {
        "tokens": torch.zeros(9),
        "lengths": np.array([2, 4, 3]),
        "response_lengths": np.array([1, 3, 2]),
        "columns": {},
    }
    TokenRows(**fields)
    with pytest.raises(BatchError, match=message):
        TokenRows(**{**fields, **changes})
