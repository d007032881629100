"""Row operations on one column, whatever its kind.

A column is jagged (one sequence per row, nothing padded), a dense tensor `[rows, ...]`, or a numpy array of Python
objects (strings, ground truths). A jagged column is its values and its row lengths: torch's nested tensors, which
users know, cost a hundred times more to make and are made of it only where somebody asks for one.
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
        """Where the rows begin and end among the values: `[0, l0, l0+l1, ...]`."""
        return torch.from_numpy(np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)]))

    def rows(self) -> tuple[Tensor, ...]:
        """Every row's values, as views."""
        return torch.split(self.values, self.lengths.tolist())


Column: TypeAlias = Tensor | Jagged | Objects


def jagged(values: Tensor, lengths: npt.ArrayLike | Tensor) -> Jagged:
    """The jagged column whose rows are `values` cut into pieces of the given lengths."""
    column = Jagged(values, np.asarray(lengths, dtype=np.int32))
    if (total := int(column.lengths.sum())) != values.shape[0]:
        raise BatchError(
            f"row lengths add up to {total}, but there are {values.shape[0]} values",
            fix="pass one length per row, and all the rows' values one after another",
        )
    return column


def from_rows(rows: Sequence[Tensor | Sequence[float]]) -> Jagged:
    """The jagged column of these rows, each a tensor or a list of numbers."""
    tensors = [row if isinstance(row, Tensor) else torch.tensor(row) for row in rows]
    # An empty Python list says nothing of its type and must not turn a column of ids into one of floats.
    filled = [tensor for tensor in tensors if tensor.numel()]
    values = torch.cat(filled) if filled else torch.zeros(0, dtype=torch.int32)
    return jagged(values, [len(tensor) for tensor in tensors])


def from_torch(tensor: Tensor, name: str) -> Tensor | Jagged:
    """A user's tensor as a column: nested tensors become jagged columns that share their values."""
    if not tensor.is_nested:
        return tensor
    if tensor.layout is not torch.jagged:
        raise BatchError(f"column `{name}` is nested, but not jagged", fix="make it with layout=torch.jagged")
    packed = tensor if tensor.lengths() is None else tensor.contiguous()  # type: ignore[attr-defined]  # no gaps
    return jagged(packed.values(), packed.offsets().diff().cpu())  # type: ignore[attr-defined]


def compact(column: Tensor | Jagged, name: str) -> Tensor | Jagged:
    """A jagged column of 64-bit integers as 32-bit ones: token ids and positions never need more."""
    if isinstance(column, Tensor) or column.values.dtype != torch.int64:
        return column
    values, limit = column.values, torch.iinfo(torch.int32)
    if values.numel() and (int(values.min()) < limit.min or int(values.max()) > limit.max):
        raise BatchError(
            f"column `{name}` holds {int(values.abs().max())}, which does not fit the 32-bit ids of a jagged column",
            fix="keep such numbers in a dense column (one per row), or store them as float64",
        )
    return Jagged(values.to(torch.int32), column.lengths)


def take(column: Column, rows: Index | slice) -> Column:
    """The given rows, in that order. A slice, with both its ends given, is a view, and anything else a copy."""
    if not isinstance(rows, slice):
        return gather([column], rows, "")
    if not isinstance(column, Jagged):
        return column[rows]
    lengths, start = column.lengths[rows], int(column.lengths[: rows.start].sum())
    return Jagged(column.values[start : start + int(lengths.sum())], lengths)


def gather(parts: Sequence[Column], rows: npt.NDArray[np.integer], name: str) -> Column:
    """These rows out of the parts' rows, which are counted through from the first part to the last."""
    if not isinstance(parts[0], Jagged):
        whole = concat(parts, name)
        return whole[torch.from_numpy(rows)] if isinstance(whole, Tensor) else whole[rows]  # type: ignore[index]
    jagged_parts = _alike(parts, name)
    pieces = [row for part in jagged_parts for row in part.rows()]  # so that each value is copied once
    values = torch.cat([pieces[row] for row in rows.tolist()]) if len(rows) else parts[0].values[:0]
    return Jagged(values, np.concatenate([part.lengths for part in jagged_parts])[rows])


def object_array(items: Sequence[Any]) -> Objects:
    """A one-dimensional array of these objects, even where they are lists of equal length."""
    array = np.empty(len(items), dtype=object)
    for index, item in enumerate(items):
        array[index] = item
    return array


def concat(columns: Sequence[Column], name: str) -> Column:
    """The rows of all these columns, one after another."""
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
    """The same columns, now known to be of one kind."""
    signatures = {signature(column) for column in columns}
    if len(signatures) > 1:
        raise BatchError(
            f"column `{name}` cannot be concatenated: its parts are {' and '.join(sorted(signatures))}",
            fix="give every part the same kind, dtype and trailing shape",
        )
    return list(columns)


def signature(column: Column) -> str:
    """What two columns must agree on to be concatenated, as a reader would say it."""
    if isinstance(column, np.ndarray):
        return "objects"
    kind, values = ("jagged", column.values) if isinstance(column, Jagged) else ("dense", column)
    return f"{kind} {str(values.dtype).removeprefix('torch.')}{list(values.shape[1:]) or ''}"


def describe(column: Column) -> str:
    """Kind, type and size of a column, for messages."""
    size = f"{len(column)} rows"
    if isinstance(column, Jagged):
        size += f", {column.values.shape[0]} values"
    return f"{signature(column)}, {size}"
