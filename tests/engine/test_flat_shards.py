"""Runs of elements as boxes of Hugging Face tensors: whatever the run, each element is named by its right place."""

from __future__ import annotations

import itertools

import pytest
import torch

from mrl.engine.flat_shards import flat_shard_regions, is_exact_cover, overlap, relative, volume
from mrl.models.hf_reader import slices
from mrl.models.parameters import Piece, Region
from mrl.models.table import Shard

HF = {"q": torch.arange(1, 61).view(10, 6), "k": torch.arange(101, 161).view(10, 6)}
"""Tensors in which no number occurs twice."""
QKV = Shard(
    chunk=0,
    name="linear_qkv.weight",
    shape=(7, 4),
    pieces=(
        Piece("q", ((5, 8), (1, 5)), ((0, 3), (0, 4))),
        Piece("k", ((2, 5), (1, 5)), ((3, 6), (0, 4))),
    ),
    padding=(((6, 7), (0, 4)),),
    expert=False,
    split=True,
)
NORM = Shard(0, "norm.weight", (6,), (Piece("v", ((4, 10),), ((0, 6),)),), (), False, False)


def local() -> torch.Tensor:
    made = torch.zeros(QKV.shape, dtype=torch.int64)
    for piece in QKV.pieces:
        made[slices(piece.target)] = HF[piece.hf][slices(piece.source)]
    return made


@pytest.mark.parametrize(("start", "stop"), [*list(itertools.combinations(range(29), 2))[::3], (0, 28)])
def test_each_element_of_a_run_is_in_one_box_at_its_place(start: int, stop: int) -> None:
    flat = local().flatten()[start:stop].clone()
    state = {"param": flat, "exp_avg": -flat}
    seen: list[int] = []
    for name, box, views in flat_shard_regions(QKV, start, state):
        assert torch.equal(views["param"], HF[name][slices(box)])
        assert torch.equal(views["exp_avg"], -views["param"])
        seen += views["param"].flatten().tolist()
    assert sorted(seen) == sorted(flat[flat > 0].tolist())


def test_a_long_run_is_an_end_whole_rows_and_a_beginning() -> None:
    boxes = [(name, box) for name, box, _ in flat_shard_regions(QKV, 2, {"param": local().flatten()[2:23]})]
    assert boxes == [
        ("q", ((5, 6), (3, 5))),
        ("q", ((6, 8), (1, 5))),
        ("k", ((2, 4), (1, 5))),
        ("k", ((4, 5), (1, 4))),
    ]


def test_a_run_of_a_vector() -> None:
    values = torch.tensor([1.0, 2.0, 3.0])
    ((name, box, views),) = flat_shard_regions(NORM, 2, {"param": values})
    assert (name, box) == ("v", ((6, 9),))
    assert torch.equal(views["param"], values)


def test_what_is_written_to_a_view_is_in_the_run() -> None:
    state = {"param": torch.zeros(21)}
    for _, _, views in flat_shard_regions(QKV, 2, state):
        views["param"].fill_(1)
    assert state["param"].tolist() == [1.0] * 21


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [
        (((0, 4), (0, 4)), ((2, 6), (1, 3)), ((2, 4), (1, 3))),
        (((0, 4), (0, 4)), ((4, 6), (0, 4)), None),
        (((0, 4), (0, 4)), ((0, 4), (4, 5)), None),
        (((3, 5),), ((0, 9),), ((3, 5),)),
        (((0, 9),), ((3, 5),), ((3, 5),)),
        (((0, 2),), ((1, 1),), None),
    ],
)
def test_what_two_boxes_have_in_common(one: Region, other: Region, common: Region | None) -> None:
    assert overlap(one, other) == common


def test_a_box_is_counted_from_another_and_measured() -> None:
    assert relative(((5, 8), (1, 5)), ((4, 9), (1, 9))) == ((1, 4), (0, 4))
    assert volume(((5, 8), (1, 5))) == 12
    assert volume(((5, 8),)) == 3
    assert volume(((5, 5), (0, 3))) == 0


@pytest.mark.parametrize(
    ("boxes", "is_cover"),
    [
        ([((0, 4), (0, 3))], True),
        ([((0, 2), (0, 3)), ((2, 4), (0, 3))], True),
        ([((2, 4), (0, 3)), ((0, 1), (2, 3)), ((1, 2), (0, 3)), ((0, 1), (0, 2))], True),
        ([], False),
        ([((0, 4), (0, 2))], False),
        ([((0, 2), (0, 3)), ((3, 4), (0, 3))], False),
        ([((0, 4), (0, 3)), ((0, 4), (0, 3))], False),
        ([((0, 2), (0, 3)), ((0, 2), (0, 3))], False),  # twice the half: the volume alone is right
        ([((0, 3), (0, 2)), ((2, 4), (0, 3))], False),  # twelve elements, of which two are held twice
        ([((0, 3), (0, 3)), ((2, 3), (0, 3))], False),
        ([((0, 4), (0, 2)), ((0, 4), (3, 4))], False),  # outside
        ([((1, 5), (0, 3))], False),
        ([((0, 4), (0, 1)), ((0, 1), (1, 3)), ((1, 4), (1, 3))], True),
        ([((0, 4), (0, 1)), ((0, 1), (1, 3)), ((3, 4), (0, 3)), ((1, 3), (1, 3))], False),
    ],
)
def test_a_cover_is_exact_or_none(boxes: list[Region], is_cover: bool) -> None:
    assert is_exact_cover((4, 3), boxes) is is_cover
    assert is_exact_cover((4, 3), boxes[::-1]) is is_cover
