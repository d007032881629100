"""Row operations on one column of any kind.

A column is jagged (one sequence per row, without padding), a dense tensor `[rows, ...]`, or a numpy array of Python
objects (strings, ground truths). Or it is remote: the driver knows the stored part of each row, but has no values. A
jagged column consists of its values and row lengths: torch's nested tensors cost a hundred times more to create, so
they are only created on request.
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
    """One sequence per row: the concatenated values of all rows, and the length of each row."""

    values: Tensor
    lengths: Lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def offsets(self) -> Tensor:
        """Return the offsets of the rows in the values: `[0, l0, l0+l1, ...]`."""
        return torch.from_numpy(np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)]))

    def rows(self) -> tuple[Tensor, ...]:
        """Return each row's values, as views."""
        return torch.split(self.values, self.lengths.tolist())


@dataclass(frozen=True)
class RemoteColumn:
    """Rows of one column, spread over stored parts.

    The parts stay in the store (Ray's object store); here a part is an opaque handle. Reordering, selecting, repeating
    or balancing rows changes two small integer arrays and moves no row.
    """

    parts: tuple[Any, ...]
    part_sizes: tuple[int, ...]
    """Number of rows in each stored part, including rows that this column does not use."""
    part_of_row: npt.NDArray[np.int32]
    row_in_part: npt.NDArray[np.int32]
    lengths: Lengths | None
    """Number of values per row of a jagged column; None for other columns."""

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
            part_of_row = np.zeros_like(part_of_row)  # the usual case: an unchanged shard
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
        """Return the concatenated rows of these columns. Parts that several of them use are listed once."""
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
        """Return whether these rows are one complete stored part in its order, so that nothing must be gathered."""
        return self.part_sizes == (len(self),) and bool(np.array_equal(self.row_in_part, np.arange(len(self))))

    def rows_among_parts(self) -> Index:
        """Return the position of each row if the rows of all parts are numbered consecutively."""
        starts = np.cumsum([0, *self.part_sizes[:-1]], dtype=np.int64)
        return np.asarray(starts[self.part_of_row] + self.row_in_part)

    def describe(self) -> str:
        kind = "" if self.lengths is None else f", {int(self.lengths.sum())} values"
        return f"stored, {len(self)} rows{kind} in {len(self.parts)} parts"


Column: TypeAlias = Tensor | Jagged | Objects
AnyColumn: TypeAlias = Column | RemoteColumn


def as_column(values: Tensor | Jagged | Sequence[Any], name: str) -> Column:
    """Return a user's values as a column: tensors, jagged columns, or anything else as Python objects."""
    if isinstance(values, (Tensor, Jagged)):
        return compact(from_torch(values, name) if isinstance(values, Tensor) else values, name)
    return values if isinstance(values, np.ndarray) and values.ndim == 1 else object_array(list(values))


def jagged(values: Tensor, lengths: npt.ArrayLike | Tensor) -> Jagged:
    """Return the jagged column whose rows are `values` cut into pieces of the given lengths."""
    column = Jagged(values, np.asarray(lengths, dtype=np.int32))
    if (total := int(column.lengths.sum())) != values.shape[0]:
        raise BatchError(
            f"the row lengths sum to {total}, but there are {values.shape[0]} values",
            fix="pass one length per row, and the concatenated values of all rows",
        )
    return column


def from_rows(rows: Sequence[Tensor | Sequence[float]]) -> Jagged:
    """Return the jagged column of these rows, each a tensor or a list of numbers."""
    tensors = [row if isinstance(row, Tensor) else torch.tensor(row) for row in rows]
    # An empty Python list has no type, and must not turn a column of ids into floats.
    filled = [tensor for tensor in tensors if tensor.numel()]
    values = torch.cat(filled) if filled else torch.zeros(0, dtype=torch.int32)
    return jagged(values, [len(tensor) for tensor in tensors])


def from_torch(tensor: Tensor, name: str) -> Tensor | Jagged:
    """Return a user's tensor as a column. Nested tensors become jagged columns that share their values."""
    if not tensor.is_nested:
        return tensor
    if tensor.layout is not torch.jagged:
        raise BatchError(f"column `{name}` is nested, but not jagged", fix="make it with layout=torch.jagged")
    packed = tensor if tensor.lengths() is None else tensor.contiguous()  # type: ignore[attr-defined]  # no gaps
    return jagged(packed.values(), packed.offsets().diff().cpu())  # type: ignore[attr-defined]


def compact(column: Tensor | Jagged, name: str) -> Tensor | Jagged:
    """Return a jagged column of 64-bit integers as 32-bit integers, which suffice for token ids and positions."""
    if isinstance(column, Tensor) or column.values.dtype != torch.int64:
        return column
    values, limit = column.values, torch.iinfo(torch.int32)
    if values.numel() and (int(values.min()) < limit.min or int(values.max()) > limit.max):
        raise BatchError(
            f"column `{name}` contains {int(values.abs().max())}, which exceeds the 32-bit ids of a jagged column",
            fix="keep such numbers in a dense column (one per row), or store them as float64",
        )
    return Jagged(values.to(torch.int32), column.lengths)


def take(column: AnyColumn, rows: Index | slice) -> AnyColumn:
    """Return these rows, in this order. A slice with both ends is a view, anything else a copy."""
    if isinstance(column, RemoteColumn):
        return column.take(rows)
    if not isinstance(rows, slice):
        return gather([column], rows, "")
    if not isinstance(column, Jagged):
        return column[rows]
    lengths, start = column.lengths[rows], int(column.lengths[: rows.start].sum())
    return Jagged(column.values[start : start + int(lengths.sum())], lengths)


def gather(parts: Sequence[Column], rows: npt.NDArray[np.integer], name: str) -> Column:
    """Return these rows of the parts, numbered consecutively from the first part to the last."""
    if not isinstance(parts[0], Jagged):
        whole = _concat_here(parts, name)
        return whole[torch.from_numpy(rows)] if isinstance(whole, Tensor) else whole[rows]  # type: ignore[index]
    jagged_parts = _same_kind(parts, name)
    pieces = [row for part in jagged_parts for row in part.rows()]  # so each value is copied once
    values = torch.cat([pieces[row] for row in rows.tolist()]) if len(rows) else parts[0].values[:0]
    return Jagged(values, np.concatenate([part.lengths for part in jagged_parts])[rows])


def object_array(items: Sequence[Any]) -> Objects:
    """Return a one-dimensional array of these objects, even if they are lists of equal length."""
    array = np.empty(len(items), dtype=object)
    for index, item in enumerate(items):
        array[index] = item
    return array


def concat(columns: Sequence[AnyColumn], name: str) -> AnyColumn:
    """Return the concatenated rows of all columns."""
    remote = [column for column in columns if isinstance(column, RemoteColumn)]
    if len(remote) == len(columns):
        return RemoteColumn.concat(remote)
    if remote:
        raise BatchError(
            f"column `{name}` is stored in one batch and local in another", fix="store or fetch it in all of them"
        )
    return _concat_here([column for column in columns if not isinstance(column, RemoteColumn)], name)


def _concat_here(columns: Sequence[Column], name: str) -> Column:
    if len(columns) == 1:
        return columns[0]
    parts = _same_kind(columns, name)
    if isinstance(columns[0], np.ndarray):
        objects: Objects = np.concatenate(parts)
        return objects
    if isinstance(columns[0], Tensor):
        return torch.cat(parts)
    return Jagged(torch.cat([part.values for part in parts]), np.concatenate([part.lengths for part in parts]))


def _same_kind(columns: Sequence[Column], name: str) -> list[Any]:
    """Return the columns after checking that they have one kind."""
    signatures = {signature(column) for column in columns}
    if len(signatures) > 1:
        raise BatchError(
            f"column `{name}` cannot be concatenated: its parts are {' and '.join(sorted(signatures))}",
            fix="give every part the same kind, dtype and trailing shape",
        )
    return list(columns)


def signature(column: Column) -> str:
    """Return a readable description of what two columns must share to be concatenated."""
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
