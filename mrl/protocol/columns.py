"""Row operations on one column, whatever its kind.

A column is jagged (one sequence per row, nothing padded), a dense tensor `[rows, ...]`, or a numpy array of Python
objects (strings, ground truths); or it is remote: the driver knows which stored part each row is in, and holds none.
A jagged column is its values and its row lengths: torch's nested tensors, which users know, cost a hundred times more
to make and are made of it only where somebody asks for one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mrl.errors import BatchError

Objects: TypeAlias = npt.NDArray[np.object_]
Lengths: TypeAlias = npt.NDArray[np.int32]
Index: TypeAlias = npt.NDArray[np.int64]

# Building a nested tensor asks torch.fx whether it is being traced, under a name that torch itself deprecates.
logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)


@dataclass(frozen=True, eq=False)
class Jagged:
    """One sequence per row: all rows' values one after another, and how many of them each row has."""

    values: Tensor
    lengths: Lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def offsets(self) -> Tensor:
        """Return where the rows begin and end among the values: `[0, l0, l0+l1, ...]`."""
        return torch.from_numpy(np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)]))

    def rows(self) -> tuple[Tensor, ...]:
        """Return every row's values, as views."""
        return torch.split(self.values, self.lengths.tolist())


@dataclass(frozen=True)
class RemoteColumn:
    """Rows of one column, spread over stored parts.

    The parts stay with whoever stores them (Ray's object store); a part is an opaque handle here. Reordering,
    selecting, repeating or re-balancing rows changes two small integer arrays and moves no row.
    """

    parts: tuple[Any, ...]
    part_sizes: tuple[int, ...]
    """Rows of each part as it is stored, whether they belong to this column or not."""
    part_of_row: npt.NDArray[np.int32]
    row_in_part: npt.NDArray[np.int32]
    lengths: Lengths | None
    """Values per row where the column is jagged; None where it is not."""

    @classmethod
    def of_part(cls, part: Any, rows: int, lengths: Lengths | None) -> RemoteColumn:
        return cls((part,), (rows,), np.zeros(rows, dtype=np.int32), np.arange(rows, dtype=np.int32), lengths)

    def __len__(self) -> int:
        return len(self.part_of_row)

    def take(self, rows: Index | slice) -> RemoteColumn:
        """Return these rows, in this order, with only the parts that they need."""
        part_of_row = self.part_of_row[rows]
        used = part_of_row[:1] if len(part_of_row) else np.zeros(1, dtype=np.int32)
        if bool((part_of_row == used[0]).all()):
            part_of_row = np.zeros_like(part_of_row)  # the usual case: a shard as it was made
        else:
            used, positions = np.unique(part_of_row, return_inverse=True)
            part_of_row = positions.astype(np.int32)
        return RemoteColumn(
            tuple(self.parts[part] for part in used),
            tuple(self.part_sizes[part] for part in used),
            part_of_row,
            self.row_in_part[rows],
            None if self.lengths is None else self.lengths[rows],
        )

    @classmethod
    def concat(cls, columns: Sequence[RemoteColumn]) -> RemoteColumn:
        """Return the rows of all these columns, one after another; a part that several of them use is listed once."""
        if len(columns) == 1:
            return columns[0]
        parts: dict[Any, int] = {}
        sizes: dict[Any, int] = {}
        part_of_row = []
        for column in columns:
            sizes.update(zip(column.parts, column.part_sizes, strict=True))
            number = np.array([parts.setdefault(part, len(parts)) for part in column.parts], dtype=np.int32)
            part_of_row.append(number[column.part_of_row] if len(column) else column.part_of_row)
        lengths = [column.lengths for column in columns if column.lengths is not None]
        return cls(
            tuple(parts),
            tuple(sizes[part] for part in parts),
            np.concatenate(part_of_row),
            np.concatenate([column.row_in_part for column in columns]),
            np.concatenate(lengths) if lengths else None,
        )

    def is_whole_part(self) -> bool:
        """Return whether these rows are one stored part, all of it and in its order: nothing has to be gathered."""
        return self.part_sizes == (len(self),) and bool(np.array_equal(self.row_in_part, np.arange(len(self))))

    def rows_among_parts(self) -> Index:
        """Return where each row is when the rows of all parts are counted through."""
        starts = np.cumsum([0, *self.part_sizes[:-1]], dtype=np.int64)
        return np.asarray(starts[self.part_of_row] + self.row_in_part)

    def describe(self) -> str:
        kind = "" if self.lengths is None else f", {int(self.lengths.sum())} values"
        return f"stored, {len(self)} rows{kind} in {len(self.parts)} parts"


Column: TypeAlias = Tensor | Jagged | Objects
AnyColumn: TypeAlias = Column | RemoteColumn


def as_column(values: Tensor | Jagged | Sequence[Any], name: str) -> Column:
    """Return a user's values as a column: tensors and jagged columns, or anything else as Python objects."""
    if isinstance(values, (Tensor, Jagged)):
        return compact(from_torch(values, name) if isinstance(values, Tensor) else values, name)
    return values if isinstance(values, np.ndarray) and values.ndim == 1 else object_array(list(values))


def jagged(values: Tensor, lengths: npt.ArrayLike | Tensor) -> Jagged:
    """Return the jagged column whose rows are `values` cut into pieces of the given lengths."""
    column = Jagged(values, np.asarray(lengths, dtype=np.int32))
    if (total := int(column.lengths.sum())) != values.shape[0]:
        raise BatchError(
            f"row lengths add up to {total}, but there are {values.shape[0]} values",
            fix="pass one length per row, and all the rows' values one after another",
        )
    return column


def from_rows(rows: Sequence[Tensor | Sequence[float]]) -> Jagged:
    """Return the jagged column of these rows, each a tensor or a list of numbers."""
    tensors = [row if isinstance(row, Tensor) else torch.tensor(row) for row in rows]
    # An empty Python list says nothing of its type and must not turn a column of ids into one of floats.
    filled = [tensor for tensor in tensors if tensor.numel()]
    values = torch.cat(filled) if filled else torch.zeros(0, dtype=torch.int32)
    return jagged(values, [len(tensor) for tensor in tensors])


def from_torch(tensor: Tensor, name: str) -> Tensor | Jagged:
    """Return a user's tensor as a column: nested tensors become jagged columns that share their values."""
    if not tensor.is_nested:
        return tensor
    if tensor.layout is not torch.jagged:
        raise BatchError(f"column `{name}` is nested, but not jagged", fix="make it with layout=torch.jagged")
    packed = tensor if tensor.lengths() is None else tensor.contiguous()  # type: ignore[attr-defined]  # no gaps
    return jagged(packed.values(), packed.offsets().diff().cpu())  # type: ignore[attr-defined]


def compact(column: Tensor | Jagged, name: str) -> Tensor | Jagged:
    """Return a jagged column of 64-bit integers as 32-bit ones: token ids and positions never need more."""
    if isinstance(column, Tensor) or column.values.dtype != torch.int64:
        return column
    values, limit = column.values, torch.iinfo(torch.int32)
    if values.numel() and (int(values.min()) < limit.min or int(values.max()) > limit.max):
        raise BatchError(
            f"column `{name}` holds {int(values.abs().max())}, which does not fit the 32-bit ids of a jagged column",
            fix="keep such numbers in a dense column (one per row), or store them as float64",
        )
    return Jagged(values.to(torch.int32), column.lengths)


def take(column: AnyColumn, rows: Index | slice) -> AnyColumn:
    """Return the given rows, in that order. A slice, with both its ends given, is a view, and anything else a copy."""
    if isinstance(column, RemoteColumn):
        return column.take(rows)
    if not isinstance(rows, slice):
        return gather([column], rows, "")
    if not isinstance(column, Jagged):
        return column[rows]
    lengths, start = column.lengths[rows], int(column.lengths[: rows.start].sum())
    return Jagged(column.values[start : start + int(lengths.sum())], lengths)


def gather(parts: Sequence[Column], rows: npt.NDArray[np.integer], name: str) -> Column:
    """Return these rows out of the parts' rows, which are counted through from the first part to the last."""
    if not isinstance(parts[0], Jagged):
        whole = _concat_here(parts, name)
        return whole[torch.from_numpy(rows)] if isinstance(whole, Tensor) else whole[rows]  # type: ignore[index]
    jagged_parts = _alike(parts, name)
    pieces = [row for part in jagged_parts for row in part.rows()]  # so that each value is copied once
    values = torch.cat([pieces[row] for row in rows.tolist()]) if len(rows) else parts[0].values[:0]
    return Jagged(values, np.concatenate([part.lengths for part in jagged_parts])[rows])


def object_array(items: Sequence[Any]) -> Objects:
    """Return a one-dimensional array of these objects, even where they are lists of equal length."""
    array = np.empty(len(items), dtype=object)
    for index, item in enumerate(items):
        array[index] = item
    return array


def concat(columns: Sequence[AnyColumn], name: str) -> AnyColumn:
    """Return the rows of all these columns, one after another."""
    remote = [column for column in columns if isinstance(column, RemoteColumn)]
    if len(remote) == len(columns):
        return RemoteColumn.concat(remote)
    if remote:
        raise BatchError(
            f"column `{name}` is stored in one batch and here in another", fix="store or fetch it in all of them"
        )
    return _concat_here([column for column in columns if not isinstance(column, RemoteColumn)], name)


def _concat_here(columns: Sequence[Column], name: str) -> Column:
    if len(columns) == 1:
        return columns[0]
    alike = _alike(columns, name)
    if isinstance(columns[0], np.ndarray):
        objects: Objects = np.concatenate(alike)
        return objects
    if isinstance(columns[0], Tensor):
        return torch.cat(alike)
    return Jagged(torch.cat([part.values for part in alike]), np.concatenate([part.lengths for part in alike]))


def _alike(columns: Sequence[Column], name: str) -> list[Any]:
    """Return the same columns, now known to be of one kind."""
    signatures = {signature(column) for column in columns}
    if len(signatures) > 1:
        raise BatchError(
            f"column `{name}` cannot be concatenated: its parts are {' and '.join(sorted(signatures))}",
            fix="give every part the same kind, dtype and trailing shape",
        )
    return list(columns)


def signature(column: Column) -> str:
    """Return what two columns must agree on to be concatenated, as a reader would say it."""
    if isinstance(column, np.ndarray):
        return "objects"
    kind, values = ("jagged", column.values) if isinstance(column, Jagged) else ("dense", column)
    return f"{kind} {str(values.dtype).removeprefix('torch.')}{list(values.shape[1:]) or ''}"


def describe(column: AnyColumn) -> str:
    if isinstance(column, RemoteColumn):
        return column.describe()
    size = f"{len(column)} rows"
    if isinstance(column, Jagged):
        size += f", {column.values.shape[0]} values"
    return f"{signature(column)}, {size}"
