"""Rectangular slices: what they share, where they lie, and every way of not covering a tensor exactly once."""

from __future__ import annotations

import pytest
import torch

from mrl.models.regions import (
    Region,
    extent,
    intersection,
    is_exact_cover,
    moved,
    num_elements,
    relative,
    slices,
    tiling_problems,
    whole,
)


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
    assert intersection(one, other) == common


def test_a_box_is_counted_from_another_and_measured() -> None:
    assert relative(((5, 8), (1, 5)), ((4, 9), (1, 9))) == ((1, 4), (0, 4))
    assert num_elements(((5, 8), (1, 5))) == 12
    assert num_elements(((5, 8),)) == 3
    assert num_elements(((5, 5), (0, 3))) == 0


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


def test_boxes_tile_a_tensor_only_once_and_whole() -> None:
    left, right = ((0, 4), (0, 2)), ((0, 4), (2, 4))
    assert list(tiling_problems((4, 4), [right, left])) == []
    assert list(tiling_problems((4, 4), [((0, 2), (0, 2)), ((0, 2), (2, 4)), ((2, 4), (0, 4))])) == []
    assert list(tiling_problems((4, 4), [left])) == ["[0:4, 2:4] of [4, 4] is covered 0 times"]
    assert list(tiling_problems((4, 4), [left, right, ((0, 1), (0, 1))])) == ["[0:1, 0:1] of [4, 4] is covered 2 times"]
    assert list(tiling_problems((4,), [((0, 5),)])) == ["[4:5] is outside [4]"]
    assert list(tiling_problems((4, 4), [((0, 4),)])) == ["boxes with other axes than shape [4, 4]"]
    assert list(tiling_problems((2,), [])) == ["[0:2] of [2] is covered 0 times"]


def test_a_region_is_where_its_surroundings_went() -> None:
    source, target, region = ((4, 8), (0, 6)), ((0, 4), (10, 16)), ((5, 7), (1, 2))
    assert moved(region, source, target) == ((1, 3), (11, 12))
    assert moved(source, source, target) == target
    assert moved(moved(region, source, target), target, source) == region


def test_a_region_takes_its_part_out_of_a_tensor() -> None:
    tensor = torch.arange(20).view(4, 5)
    assert tensor[slices(((1, 3), (0, 2)))].tolist() == [[5, 6], [10, 11]]
    assert torch.equal(tensor[slices(whole((4, 5)))], tensor)
    assert extent(((1, 3), (0, 5))) == (2, 5)
