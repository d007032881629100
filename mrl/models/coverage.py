"""Whether boxes cover a tensor exactly once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise, product

from mrl.models.parameters import Region, Shape

_MAX_LISTED = 12


def tiling_problems(shape: Shape, boxes: Iterable[Region]) -> Iterator[str]:
    """What is left out, doubled or outside where boxes should cover a tensor exactly once."""
    ordered = sorted(boxes)
    if any(len(box) != len(shape) for box in ordered):
        yield f"boxes with other axes than shape {list(shape)}"
    elif not any(_is_chain(shape, ordered, axis) for axis in range(len(shape))):
        yield from _cell_problems(shape, ordered)


def problem_list(problems: list[str]) -> str:
    """The problems line by line, or as many of them as somebody will read."""
    rest = [f"and {len(problems) - _MAX_LISTED} more"] if len(problems) > _MAX_LISTED else []
    return "\n  - ".join(["", *problems[:_MAX_LISTED], *rest])


def _is_chain(shape: Shape, boxes: list[Region], axis: int) -> bool:
    """Whether the boxes follow each other along one axis and are full on the others: the usual case, told fast."""
    position = 0
    for box in boxes:
        full = all(box[other] == (0, size) for other, size in enumerate(shape) if other != axis)
        if not full or box[axis][0] != position:
            return False
        position = box[axis][1]
    return position == shape[axis]


def _cell_problems(shape: Shape, boxes: list[Region]) -> Iterator[str]:
    """The tensor cut wherever a box starts or ends: each cell must lie in one box."""
    edges = [sorted({0, size, *(edge for box in boxes for edge in box[axis])}) for axis, size in enumerate(shape)]
    for cell in product(*(list(pairwise(axis)) for axis in edges)):
        count = sum(all(a <= x and y <= b for (a, b), (x, y) in zip(box, cell, strict=True)) for box in boxes)
        inside = all(x >= 0 and y <= size for (x, y), size in zip(cell, shape, strict=True))
        if count != inside:
            at = ", ".join(f"{start}:{stop}" for start, stop in cell)
            yield f"[{at}] of {list(shape)} is covered {count} times" if inside else f"[{at}] is outside {list(shape)}"
