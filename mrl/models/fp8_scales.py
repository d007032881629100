"""Scales of weights that travel in FP8: one for each row, or one for each block of 128 x 128.

Scales are described as further tensors next to the weights, so that plans, messages and digests treat both alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from mrl.models.parameters import Piece
from mrl.models.regions import Region, Shape

Fp8Form: TypeAlias = Literal["channel", "block"]
FP8: Literal["float8_e4m3fn"] = "float8_e4m3fn"
SCALE = "_scale"
"""End of the name of the scales of a tensor, on both sides."""
BLOCK = 128


def scale_box(box: Region, form: Fp8Form) -> Region:
    """Return the box of the scales of a box of a matrix. Boxes of blocks begin and end at multiples of 128."""
    if form == "channel":
        return box[0], (0, 1)
    return tuple((start // BLOCK, stop // BLOCK) for start, stop in box)


def scale_shape(shape: Shape, form: Fp8Form) -> Shape:
    """Return the shape of the scales of a matrix, or of stacked matrices."""
    *stacked, rows, columns = shape
    return (*stacked, rows, 1) if form == "channel" else (*stacked, rows // BLOCK, columns // BLOCK)


def scale_pieces(pieces: Sequence[Piece], form: Fp8Form) -> tuple[Piece, ...]:
    """Return the pieces of the scales of a tensor; none of a vector."""
    return tuple(
        Piece(piece.hf + SCALE, scale_box(piece.source, form), scale_box(piece.target, form))
        for piece in pieces
        if len(piece.source) == 2
    )


def is_on_blocks(box: Region) -> bool:
    """Return whether a box of a matrix consists of whole blocks."""
    return not any(edge % BLOCK for axis in box for edge in axis)
