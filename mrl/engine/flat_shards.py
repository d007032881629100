"""Runs of a tensor's elements as boxes: what a data-parallel rank owns of a parameter, as Hugging Face numbers it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from mrl.models.regions import Region, Shape, extent, intersection, moved, relative, slices
from mrl.models.table import Shard

State = dict[str, Tensor]
"""Of the same elements: weights ("param") and moments, by Megatron's names."""


def flat_shard_regions(shard: Shard, start: int, state: State) -> Iterator[tuple[str, Region, State]]:
    """The Hugging Face boxes in a run of a parameter's elements, each with views of what the run has of it."""
    length = len(next(iter(state.values())))
    for place, first, last in _rectangles(shard.shape, start, start + length):
        views = {name: flat[first - start : last - start].view(extent(place)) for name, flat in state.items()}
        for piece in shard.pieces:
            if common := intersection(place, piece.target):
                inside = slices(relative(common, place))
                box = moved(common, piece.target, piece.source)
                yield piece.hf, box, {name: view[inside] for name, view in views.items()}


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
