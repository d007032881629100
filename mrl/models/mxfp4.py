"""Weights in MXFP4, as gpt-oss is published: read, never written.

Each row of a matrix is cut into groups of 32 numbers. `X_blocks` holds their 4 bits each, two in a byte with the first
in the low half, and `X_scales` one exponent per group. Matrices of files in bfloat16, called `X`, are transposed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from mrl.models.regions import Region, Shape

if TYPE_CHECKING:
    import torch

METHOD = "mxfp4"
BLOCKS, SCALES = "_blocks", "_scales"
FILE_TYPE = "U8"
_GROUP = 32
_EXPONENT_OF_ONE = 127
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def packed_names(names: Collection[str]) -> set[str]:
    """Return the names `X` of tensors in this format, from the names in the files."""
    blocks = (name.removesuffix(BLOCKS) for name in names if name.endswith(BLOCKS))
    return {name for name in blocks if name + SCALES in names}


def shape_of(blocks: Shape) -> Shape:
    """Return the shape [experts, columns, rows] of `X`, from that of its blocks [experts, rows, groups, 16]."""
    *outer, rows, groups, _ = blocks
    return (*outer, groups * _GROUP, rows)


def covering(box: Region) -> Region:
    """Return the groups [experts, rows, groups] that a box of `X` needs."""
    experts, (start, stop), rows = box
    return experts, rows, (start // _GROUP, -(-stop // _GROUP))


def problems(name: str, blocks: tuple[Shape, str], scales: tuple[Shape, str]) -> Iterator[str]:
    """Yield where blocks or scales, each given by shape and type, have another form."""
    for part, (_, kind) in ((BLOCKS, blocks), (SCALES, scales)):
        if kind != FILE_TYPE:
            yield f"{name}{part} holds {kind}, not {FILE_TYPE}"
    expected = (*blocks[0][:-1], _GROUP // 2)
    if len(blocks[0]) != 4 or blocks[0] != expected:
        yield f"{name}{BLOCKS} has shape {list(blocks[0])}, not [experts, rows, groups, {_GROUP // 2}]"
    elif scales[0] != expected[:-1]:
        yield f"{name}{SCALES} has shape {list(scales[0])}, not {list(expected[:-1])}"


def dequantized(blocks: torch.Tensor, scales: torch.Tensor, box: Region) -> torch.Tensor:
    """Return a box of `X` in float32, from the groups that cover it."""
    import torch

    values = torch.tensor(_MAGNITUDES + tuple(-value for value in _MAGNITUDES))
    numbers = torch.stack([values[(blocks & 15).int()], values[(blocks >> 4).int()]], -1).flatten(-2)
    rows = torch.ldexp(numbers, scales.int()[..., None] - _EXPONENT_OF_ONE).flatten(-2)
    _, (start, stop), _ = box
    first = start // _GROUP * _GROUP
    return rows[..., start - first : stop - first].transpose(-1, -2)
