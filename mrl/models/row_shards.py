"""The parts of a model that each rank holds if torch shards it: rows of each tensor, and whole experts.

`fully_shard` cuts every parameter along its first axis into equal parts, of which the last ones may be shorter or
empty. transformers stacks the matrices of all experts of a layer, so there a rank holds some of the experts.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

from mrl.models.parameters import Piece
from mrl.models.regions import Region, Shape, whole
from mrl.models.table import Shard

_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def rows_of_rank(num_rows: int, rank: int, size: int) -> tuple[int, int]:
    """Return the first row of a rank and the row after its last one."""
    most = -(-num_rows // size)
    return min(rank * most, num_rows), min((rank + 1) * most, num_rows)


def expert_of(name: str) -> int | None:
    """Return the number of the expert that a tensor belongs to; None if to no expert."""
    match = _EXPERT.search(name)
    return int(match[1]) if match else None


def row_shards(tensors: Mapping[str, Shape], untrained: Collection[str], rank: int, size: int) -> Iterator[Shard]:
    """Yield the parts of Hugging Face's tensors that a rank holds, under their own names."""
    num_experts: dict[str, int] = defaultdict(int)
    for name in tensors:
        if (expert := expert_of(name)) is not None:
            stack = _EXPERT.sub(".", name)
            num_experts[stack] = max(num_experts[stack], expert + 1)
    for name, shape in tensors.items():
        if name in untrained:
            yield box_of(name, shape, whole(shape), trained=False)
        elif (expert := expert_of(name)) is not None:
            first, stop = rows_of_rank(num_experts[_EXPERT.sub(".", name)], rank, size)
            if first <= expert < stop:
                yield box_of(name, shape, whole(shape))
        else:
            first, stop = rows_of_rank(shape[0], rank, size)
            if first < stop:
                yield box_of(name, shape, ((first, stop), *whole(shape[1:])))


def box_of(name: str, shape: Shape, box: Region, *, trained: bool = True) -> Shard:
    """Return the shard of one box of a tensor."""
    local = tuple(stop - start for start, stop in box)
    piece = Piece(name, box, whole(local))
    return Shard(0, name, local, (piece,), (), expert_of(name) is not None, box != whole(shape), trained=trained)
