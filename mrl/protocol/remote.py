"""A column that the driver knows without holding it: where its parts are, and which row is where.

The parts stay with whoever stores them (Ray's object store); a part is an opaque handle here. Reordering,
selecting, repeating or re-balancing rows changes two small integer arrays and moves no row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mrl.protocol.columns import Index, Lengths


@dataclass(frozen=True)
class RemoteColumn:
    """Rows of one column, spread over stored parts."""

    parts: tuple[Any, ...]
    part_sizes: tuple[int, ...]
    """Rows of each part as it is stored, whether they belong to this column or not."""
    part_of_row: npt.NDArray[np.int32]
    row_in_part: npt.NDArray[np.int32]
    lengths: Lengths | None
    """Values per row where the column is jagged; None where it is not."""

    @classmethod
    def of_part(cls, part: Any, rows: int, lengths: Lengths | None) -> RemoteColumn:
        """The column that one stored part is."""
        return cls((part,), (rows,), np.zeros(rows, dtype=np.int32), np.arange(rows, dtype=np.int32), lengths)

    def __len__(self) -> int:
        return len(self.part_of_row)

    def take(self, rows: Index | slice) -> RemoteColumn:
        """These rows, in this order, with only the parts that they need."""
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
        """The rows of all these columns, one after another; a part that several of them use is listed once."""
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
        """Whether these rows are one stored part, all of it and in its order: nothing has to be gathered."""
        return self.part_sizes == (len(self),) and bool(np.array_equal(self.row_in_part, np.arange(len(self))))

    def rows_among_parts(self) -> Index:
        """Where each row is when the rows of all parts are counted through."""
        starts = np.cumsum([0, *self.part_sizes[:-1]], dtype=np.int64)
        return np.asarray(starts[self.part_of_row] + self.row_in_part)

    def describe(self) -> str:
        """Kind and size of the column, for messages."""
        kind = "" if self.lengths is None else f", {int(self.lengths.sum())} values"
        return f"stored, {len(self)} rows{kind} in {len(self.parts)} parts"
