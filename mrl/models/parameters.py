"""Composition of a Megatron parameter: rows of Hugging Face tensors, stacked, then split over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from mrl.models.regions import Region, Shape
from mrl.rounding import round_up

OwnDtype: TypeAlias = Literal["float32", "float8_e4m3fn"] | None
"""Dtype of a tensor that is the same in models of any dtype; None: the dtype of the model."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One box of a Hugging Face tensor that maps to one box, with the same extent, of a local Megatron tensor."""

    hf: str
    source: Region
    target: Region


@dataclass(frozen=True, slots=True)
class RowRange:
    """Consecutive rows of one Hugging Face tensor."""

    hf: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Parameter:
    """One Megatron parameter before it is split.

    Its rows are those of its parts, one after another. Each part is split separately: for gate and up, a rank holds its
    share of the gate above its share of up, while queries, keys and values are one part, split as a whole.
    """

    name: str
    parts: tuple[tuple[RowRange, ...], ...]
    columns: int | None = None  # None: a vector
    split: Literal["rows", "columns"] | None = None  # None: every rank holds all of it
    padded: bool = False  # rows of zeros at the end, up to a multiple of the ranks
    dtype: OwnDtype = None
    trained: bool = True  # False: a buffer of Megatron's module, without gradient and optimizer state
    tail: Shape = ()  # further axes after the columns, which are never split

    def share(self, rank: int, num_ranks: int) -> tuple[Shape, tuple[Piece, ...], tuple[Region, ...]]:
        """Return shape, pieces and padding of the share of one of `num_ranks` ranks."""
        columns = None if self.columns is None else (0, self.columns)
        if columns and self.split == "columns":
            columns = _share(columns[1], rank, num_ranks)
        row_rank, num_row_ranks = (rank, num_ranks) if self.split == "rows" else (0, 1)
        # In the local tensor, columns always start at 0.
        tail = tuple((0, size) for size in self.tail)
        source_rest = () if columns is None else (columns, *tail)
        target_rest = () if columns is None else ((0, columns[1] - columns[0]), *tail)
        pieces: list[Piece] = []
        padding: list[Region] = []
        top = 0  # local row at which the current part starts
        for part in self.parts:
            num_rows = sum(rows.stop - rows.start for rows in part)
            if self.padded:
                num_rows = padded_vocab(num_rows, num_ranks)
            first, last = _share(num_rows, row_rank, num_row_ranks)
            end = first
            for rows, at in _cut(part, first, last):
                start, end = top + at - first, at + rows.stop - rows.start
                target = ((start, top + end - first), *target_rest)
                pieces.append(Piece(rows.hf, ((rows.start, rows.stop), *source_rest), target))
            if end < last:
                padding.append(((top + end - first, top + last - first), *target_rest))
            top += last - first
        return (top, *(stop for _, stop in target_rest)), tuple(pieces), tuple(padding)


def whole_tensor(name: str, hf: str, rows: int, columns: int | None = None, dtype: OwnDtype = None) -> Parameter:
    """Return a Hugging Face tensor that every rank holds."""
    return Parameter(name, ((RowRange(hf, 0, rows),),), columns, dtype=dtype)


def rows_of(name: str, hf: str, rows: int, columns: int) -> Parameter:
    """Return a Hugging Face tensor of which each rank holds some rows."""
    return Parameter(name, ((RowRange(hf, 0, rows),),), columns, "rows")


def columns_of(name: str, hf: str, rows: int, columns: int) -> Parameter:
    """Return a Hugging Face tensor of which each rank holds some columns."""
    return Parameter(name, ((RowRange(hf, 0, rows),),), columns, "columns")


def padded_vocab(vocab: int, tp: int) -> int:
    """Return the rows of the embedding over all ranks: the smallest multiple of `tp`, which is all that Megatron
    requires.

    More rows would cost memory and time in every head, and a size chosen for hardware is not part of the model.
    """
    return round_up(vocab, tp)


def _share(size: int, rank: int, num_ranks: int) -> tuple[int, int]:
    assert size % num_ranks == 0, f"{size} does not split over {num_ranks} ranks: the layout was not checked"
    return rank * size // num_ranks, (rank + 1) * size // num_ranks


def _cut(part: tuple[RowRange, ...], first: int, last: int) -> Iterator[tuple[RowRange, int]]:
    """Yield the ranges of a part inside its rows `first` to `last`, each with its first row."""
    position = 0
    for rows in part:
        end = position + rows.stop - rows.start
        start, stop = max(first, position), min(last, end)
        if start < stop:
            yield RowRange(rows.hf, rows.start + start - position, rows.start + stop - position), start
        position = end
