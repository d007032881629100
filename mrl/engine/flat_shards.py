"""Runs of a tensor's elements as boxes: what a data-parallel rank owns of a parameter, as Hugging Face numbers it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from mrl.models.hf_reader import slices
from mrl.models.parameters import Region, Shape
from mrl.models.table import Shard

State = dict[str, Tensor]
"""Of the same elements: weights ("param") and moments, by Megatron's names."""


def flat_shard_regions(shard: Shard, start: int, state: State) -> Iterator[tuple[str, Region, State]]:
    """The Hugging Face boxes in a run of a parameter's elements, each with views of what the run has of it."""
    length = len(next(iter(state.values())))
    for place, first, last in _rectangles(shard.shape, start, start + length):
        shape = [stop - begin for begin, stop in place]
        views = {name: flat[first - start : last - start].view(shape) for name, flat in state.items()}
        for piece in shard.pieces:
            common = overlap(place, piece.target)
            if common is not None:
                inside = relative(common, place)
                source = tuple(
                    (begin + a - t, begin + b - t)
                    for (a, b), (t, _), (begin, _) in zip(common, piece.target, piece.source, strict=True)
                )
                yield piece.hf, source, {name: view[slices(inside)] for name, view in views.items()}


def _rectangles(shape: Shape, start: int, stop: int) -> Iterator[tuple[Region, int, int]]:
    """A run of elements of a tensor in row order as the end of a row, whole rows, and the beginning of a row."""
    if len(shape) == 1:
        yield ((start, stop),), start, stop
        return
    columns = shape[1]
    while start < stop:
        row, column = divmod(start, columns)
        rows = (stop - start) // columns if column == 0 else 0
        end = start + rows * columns if rows else min(stop, (row + 1) * columns)
        across = (0, columns) if rows else (column, column + end - start)
        yield ((row, row + max(rows, 1)), across), start, end
        start = end


def overlap(a: Region, b: Region) -> Region | None:
    """What two boxes have in common."""
    common = tuple((max(x, u), min(y, v)) for (x, y), (u, v) in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


def relative(box: Region, origin: Region) -> Region:
    """The same box, counted from where another begins."""
    return tuple((start - first, stop - first) for (start, stop), (first, _) in zip(box, origin, strict=True))


def volume(box: Region) -> int:
    """Its number of elements."""
    return int(torch.Size(stop - start for start, stop in box).numel())


def is_exact_cover(shape: Shape, boxes: Iterable[Region]) -> bool:
    """Whether the boxes lie inside, apart from each other, and have the tensor's volume together."""
    whole = tuple((0, size) for size in shape)
    ordered = sorted(boxes)
    open_boxes: list[Region] = []
    for box in ordered:
        open_boxes = [other for other in open_boxes if other[0][1] > box[0][0]]
        if overlap(box, whole) != box or any(overlap(box, other) for other in open_boxes):
            return False
        open_boxes.append(box)
    return sum(map(volume, ordered)) == volume(whole)
