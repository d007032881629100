"""Row operations on one column, whatever its kind.

A column is a jagged tensor (one sequence per row: `torch.jagged` values and offsets, nothing padded), a dense
tensor `[rows, ...]`, or a numpy array of Python objects (strings, ground truths).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mrl.errors import BatchError

Objects: TypeAlias = npt.NDArray[np.object_]
Column: TypeAlias = Tensor | Objects
Index: TypeAlias = npt.NDArray[np.int64]

# Building a nested tensor asks torch.fx whether it is being traced, under a name that torch itself deprecates.
logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)


def is_jagged(column: object) -> TypeGuard[Tensor]:
    """Whether a column holds one sequence per row."""
    return isinstance(column, Tensor) and column.is_nested


def values_of(column: Column) -> Tensor:
    """All rows' values of a jagged column, one after another."""
    if not is_jagged(column):
        raise BatchError("only a jagged column has rows of values")
    return column.values()


def offsets_in(column: Tensor) -> Tensor:
    """Where the rows of a jagged column begin and end among its values."""
    offsets: Tensor = column.offsets()  # type: ignore[attr-defined]  # every jagged tensor has them
    return offsets


def jagged(values: Tensor, lengths: npt.ArrayLike | Tensor) -> Tensor:
    """The jagged column whose rows are `values` cut into pieces of the given lengths."""
    offsets = offsets_of(torch.as_tensor(lengths))
    if int(offsets[-1]) != values.shape[0]:
        raise BatchError(
            f"row lengths add up to {int(offsets[-1])}, but there are {values.shape[0]} values",
            fix="pass one length per row, and all the rows' values one after another",
        )
    return with_offsets(values, offsets)


def with_offsets(values: Tensor, offsets: Tensor) -> Tensor:
    """A jagged column from ready offsets. Columns that share the offsets object can be added or multiplied."""
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def offsets_of(lengths: Tensor) -> Tensor:
    """`[0, l0, l0+l1, ...]` as int64."""
    offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def from_rows(rows: Sequence[Tensor | Sequence[float]]) -> Tensor:
    """The jagged column of these rows, each a tensor or a list of numbers."""
    tensors = [row if isinstance(row, Tensor) else torch.tensor(row) for row in rows]
    # An empty Python list says nothing of its type and must not turn a column of ids into one of floats.
    filled = [tensor for tensor in tensors if tensor.numel()]
    if not filled:
        return jagged(torch.zeros(0, dtype=torch.int32), [0] * len(tensors))
    return jagged(torch.cat(filled), [len(tensor) for tensor in tensors])


def compact(column: Tensor, name: str) -> Tensor:
    """A jagged column of 64-bit integers as 32-bit ones: token ids and positions never need more."""
    if not column.is_nested or column.dtype != torch.int64:
        return column
    values = column.values()
    limit = torch.iinfo(torch.int32)
    if values.numel() and (int(values.min()) < limit.min or int(values.max()) > limit.max):
        raise BatchError(
            f"column `{name}` holds {int(values.abs().max())}, which does not fit the 32-bit ids of a jagged column",
            fix="keep such numbers in a dense column (one per row), or store them as float64",
        )
    return with_offsets(values.to(torch.int32), offsets_in(column))


def share_offsets(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same columns, those with equal row lengths on one offsets object, so that torch lets them be combined."""
    shared: dict[bytes, Tensor] = {}
    result = dict(columns)
    for name, column in columns.items():
        if column.is_nested:
            offsets = offsets_in(column)
            first = shared.setdefault(offsets.numpy().tobytes(), offsets)
            if first is not offsets:
                result[name] = with_offsets(column.values(), first)
    return result


def num_rows(column: Column) -> int:
    """How many rows a column has."""
    return int(offsets_in(column).numel()) - 1 if is_jagged(column) else len(column)


def row_lengths(column: Column) -> npt.NDArray[np.int32]:
    """Number of values in each row of a jagged column."""
    if not is_jagged(column):
        raise BatchError("only a jagged column has row lengths")
    return np.diff(offsets_in(column).numpy()).astype(np.int32)


def take(column: Column, rows: Index) -> Column:
    """The given rows, in that order. Consecutive rows are a view, anything else a copy."""
    first, count = (int(rows[0]), len(rows)) if len(rows) else (0, 0)
    if not np.array_equal(rows, np.arange(first, first + count)):
        return gather([column], np.zeros(count, dtype=np.int64), rows)
    if not is_jagged(column):
        return column[first : first + count]
    offsets = offsets_in(column)
    start, end = int(offsets[first]), int(offsets[first + count])
    return with_offsets(column.values()[start:end], offsets[first : first + count + 1] - start)


def gather(
    parts: Sequence[Column], part_of_row: npt.NDArray[np.integer], row_in_part: npt.NDArray[np.integer]
) -> Column:
    """The column whose row i is row `row_in_part[i]` of part `part_of_row[i]`; each value is copied once."""
    where = list(zip(part_of_row.tolist(), row_in_part.tolist(), strict=True))
    if is_jagged(parts[0]):
        lengths = [row_lengths(part).tolist() for part in parts]
        pieces = [torch.split(values_of(part), sizes) for part, sizes in zip(parts, lengths, strict=True)]
        values = torch.cat([pieces[part][row] for part, row in where]) if where else values_of(parts[0])[:0]
        return jagged(values, [lengths[part][row] for part, row in where])
    if isinstance(parts[0], np.ndarray):
        return object_array([parts[part][row] for part, row in where])
    dense = [part for part in parts if isinstance(part, Tensor)]
    if len(dense) == 1:
        return dense[0][torch.from_numpy(row_in_part).long()]
    return torch.stack([dense[part][row] for part, row in where]) if where else dense[0][:0]


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
    signatures = {signature(column) for column in columns}
    if len(signatures) > 1:
        raise BatchError(
            f"column `{name}` cannot be concatenated: its parts are {' and '.join(sorted(signatures))}",
            fix="give every part the same kind, dtype and trailing shape",
        )
    if isinstance(columns[0], np.ndarray):
        return np.concatenate(columns)
    tensors = [column for column in columns if isinstance(column, Tensor)]
    if is_jagged(tensors[0]):
        lengths = np.concatenate([row_lengths(column) for column in tensors])
        return jagged(torch.cat([column.values() for column in tensors]), lengths)
    return torch.cat(tensors)


def signature(column: Column) -> str:
    """What two columns must agree on to be concatenated, as a reader would say it."""
    if isinstance(column, np.ndarray):
        return "objects"
    dtype = str(column.dtype).removeprefix("torch.")
    if column.is_nested:
        return f"jagged {dtype}{list(column.values().shape[1:]) or ''}"
    return f"dense {dtype}{list(column.shape[1:]) or ''}"


def describe(column: Column) -> str:
    """Kind, type and size of a column, for messages."""
    size = f"{num_rows(column)} rows"
    if is_jagged(column):
        size += f", {column.values().shape[0]} values"
    return f"{signature(column)}, {size}"
