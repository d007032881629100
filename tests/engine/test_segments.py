"""Attention in a packed micro-batch: each token sees its own row, up to itself, within the window."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mrl.engine.packed_attention import in_blocks
from mrl.engine.packed_rows import SequenceSharding, _local_places
from mrl.engine.segments import _WASTE, Block, Segments

CPU = torch.device("cpu")
ROWS = [[1], [7], [1, 1, 1], [3, 8, 1], [6, 6], [2, 9, 30, 4, 29, 1], [5, 0, 4]]
REACHES = [None, 1, 2, 4, 5, 6, 7, 8, 28, 29, 30]


def stored_of(rows: list[int], cp: int) -> np.ndarray:
    multiple = 2 * cp if cp > 1 else 1
    return np.array([-(-length // multiple) * multiple for length in rows])


def places_here(stored: np.ndarray, cut: SequenceSharding) -> np.ndarray:
    return _local_places(stored, np.cumsum(stored) - stored, cut)


def seen_in(block: Block) -> dict[int, list[int]]:
    """Return the keys of each real query, both by position."""
    seen: dict[int, list[int]] = {}
    num_queries, num_keys = block.query_BS.shape[1], block.key_BS.shape[1]
    for kept in block.kept.tolist():
        segment, query = divmod(kept, num_queries)
        if block.mask_BSS is None:
            assert num_queries == num_keys, "plain causality needs as many keys as queries"
            keys = torch.arange(num_keys) <= query
        else:
            keys = block.mask_BSS[segment, query]
        seen[int(block.query_BS[segment, query])] = block.key_BS[segment][keys].tolist()
    return seen


def expected_keys(stored: np.ndarray, reach: int | None) -> dict[int, list[int]]:
    starts = np.cumsum(stored) - stored
    return {
        start + at: [start + key for key in range(0 if reach is None else max(0, at - reach), at + 1)]
        for start, length in zip(starts.tolist(), stored.tolist(), strict=True)
        for at in range(length)
    }


@pytest.mark.parametrize("cp", [1, 2, 3])
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_every_token_sees_its_own_row_up_to_itself_and_as_far_back_as_it_reaches(rows: list[int], cp: int) -> None:
    stored = stored_of(rows, cp)
    for rank in range(cp):
        here = places_here(stored, SequenceSharding(cp, rank))
        segments = Segments.of(stored, cp, rank, CPU)
        for reach in REACHES:
            blocks, places = segments.blocks(reach)
            seen = {query: keys for block in blocks for query, keys in seen_in(block).items()}
            expected = expected_keys(stored, reach)
            assert {int(here[query]): sorted(keys) for query, keys in seen.items()} == {
                place: expected[place] for place in here.tolist()
            }, (rank, reach)
            queries = torch.cat([block.query_BS.flatten()[block.kept] for block in blocks])
            assert queries[places].tolist() == list(range(len(here)))


@pytest.mark.parametrize(("length", "is_plain"), [(5, True), (6, True), (7, False), (8, False)])
def test_the_window_cuts_a_row_as_soon_as_it_is_longer_than_the_window(length: int, is_plain: bool) -> None:
    (block,), _ = Segments.of(np.array([length]), 1, 0, CPU).blocks(5)
    assert (block.mask_BSS is None) == is_plain
    assert len(seen_in(block)[length - 1]) == min(length, 6)


def test_blocks_of_one_reach_are_not_those_of_another() -> None:
    segments = Segments.of(np.array([9]), 1, 0, CPU)
    for reach in (None, 3, 8, 3, None):
        (block,), _ = segments.blocks(reach)
        assert len(seen_in(block)[8]) == (9 if reach is None else reach + 1)
    assert segments.blocks(3) is segments.blocks(3)


def test_blocks_compute_little_more_than_what_segments_need() -> None:
    lengths = np.random.default_rng(0).integers(1, 200, 60)
    blocks, _ = Segments.of(lengths, 1, 0, CPU).blocks(None)
    computed = sum(block.query_BS.numel() * block.key_BS.shape[1] for block in blocks)
    assert computed <= _WASTE * int((lengths**2).sum())
    assert len(blocks) < len(lengths) / 2
    assert sum(len(block.kept) for block in blocks) == lengths.sum()


@pytest.mark.parametrize("cp", [2, 3])
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_the_pieces_of_all_ranks_are_put_back_into_row_order(rows: list[int], cp: int) -> None:
    stored = stored_of(rows, cp)
    gathered = torch.from_numpy(np.concatenate([places_here(stored, SequenceSharding(cp, rank)) for rank in range(cp)]))
    for rank in range(cp):
        order = Segments.of(stored, cp, rank, CPU).key_order
        assert order is not None
        assert gathered[order].tolist() == list(range(int(stored.sum())))


def test_without_context_ranks_keys_stay_as_they_are() -> None:
    assert Segments.of(np.array([3, 4]), 1, 0, CPU).key_order is None


@pytest.mark.parametrize("reach", [None, 3])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("cp", [1, 2])
def test_attentionin_blocks_is_attention_row_by_row(cp: int, scale: float | None, reach: int | None) -> None:
    noise = torch.Generator().manual_seed(0)
    stored = stored_of([2, 9, 5, 1, 8], cp)
    total, num_heads, num_groups, size = int(stored.sum()), 4, 2, 8
    query = torch.randn(total, num_heads, size, generator=noise)
    key, value = (torch.randn(total, num_groups, size, generator=noise) for _ in range(2))
    whole = torch.empty(total, num_heads, size)
    for place, keys in expected_keys(stored, reach).items():
        for head in range(num_heads):
            group = head // (num_heads // num_groups)
            weights = (key[keys, group] @ query[place, head] * (scale or size**-0.5)).softmax(0)
            whole[place, head] = weights @ value[keys, group]
    for rank in range(cp):
        here = torch.from_numpy(places_here(stored, SequenceSharding(cp, rank)))
        segments = Segments.of(stored, cp, rank, CPU)
        found = in_blocks((query[here], key, value), segments, scale, reach)
        torch.testing.assert_close(found, whole[here], rtol=1e-5, atol=1e-6)
