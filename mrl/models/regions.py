"""Rectangular slices of tensors: intersections, relative positions, and exact covers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise, product

Region = tuple[tuple[int, int], ...]
"""A rectangular slice: start and stop on every axis."""
Shape = tuple[int, ...]


def whole(shape: Shape) -> Region:
    return tuple((0, size) for size in shape)


def extent(region: Region) -> Shape:
    return tuple(stop - start for start, stop in region)


def num_elements(region: Region) -> int:
    count = 1  # plans call this millions of times: a loop is twice as fast as math.prod
    for start, stop in region:
        count *= stop - start
    return count


def slices(region: Region) -> tuple[slice, ...]:
    """Return the index that selects a region of a tensor."""
    return tuple(slice(start, stop) for start, stop in region)


def intersection(one: Region, other: Region) -> Region | None:
    """Return the intersection of two regions, or None if it is empty."""
    shared = []
    for (a, b), (c, d) in zip(one, other, strict=True):
        start, stop = max(a, c), min(b, d)
        if start >= stop:
            return None
        shared.append((start, stop))
    return tuple(shared)


def moved(region: Region, source: Region, target: Region) -> Region:
    """Return the position of a region after its surroundings `source` have moved to `target`.

    With `source` ((4, 8), (0, 6)) at `target` ((0, 4), (10, 16)), ((5, 7), (1, 2)) is ((1, 3), (11, 12)).
    A vector may be a column of a matrix: the last axis of the longer one has a single place.
    """
    kept = tuple(
        (start - origin + new, stop - origin + new)
        for (start, stop), (origin, _), (new, _) in zip(region, source, target, strict=False)
    )
    return kept + target[len(source) :]


def relative(region: Region, surroundings: Region) -> Region:
    """Return the region relative to the start of its surroundings."""
    return tuple((start - first, stop - first) for (start, stop), (first, _) in zip(region, surroundings, strict=True))


def is_exact_cover(shape: Shape, regions: Iterable[Region]) -> bool:
    """Return whether the regions lie inside the tensor, do not overlap, and cover it completely."""
    full = whole(shape)
    ordered = sorted(regions)
    reaching: list[Region] = []  # regions that extend, on the first axis, beyond the start of the current one
    for region in ordered:
        reaching = [other for other in reaching if other[0][1] > region[0][0]]
        if intersection(region, full) != region or any(intersection(region, other) for other in reaching):
            return False
        reaching.append(region)
    return sum(map(num_elements, ordered)) == num_elements(full)


def tiling_problems(shape: Shape, regions: Iterable[Region]) -> Iterator[str]:
    """Yield what is missing, duplicated or outside, if the regions should cover a tensor exactly once."""
    regions = list(regions)
    if any(len(region) != len(shape) for region in regions):
        yield f"boxes with other axes than shape {list(shape)}"
    elif not is_exact_cover(shape, regions):
        yield from _cell_problems(shape, regions)


def _cell_problems(shape: Shape, regions: list[Region]) -> Iterator[str]:
    """Split the tensor wherever a region starts or ends. Each cell must lie in exactly one region."""
    edges = [sorted({0, size, *(edge for box in regions for edge in box[axis])}) for axis, size in enumerate(shape)]
    for cell in product(*(list(pairwise(axis)) for axis in edges)):
        count = sum(intersection(cell, region) == cell for region in regions)
        is_inside = intersection(cell, whole(shape)) == cell
        if count != is_inside:
            at = ", ".join(f"{start}:{stop}" for start, stop in cell)
            shown_shape = list(shape)
            yield (
                f"[{at}] of {shown_shape} is covered {count} times" if is_inside else f"[{at}] is outside {shown_shape}"
            )
