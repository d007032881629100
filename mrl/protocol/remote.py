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

from mrl.protocol.columns import Index


@dataclass(frozen=True)
class RemoteColumn:
    """Rows of one column, spread over stored parts."""

    parts: tuple[Any, ...]
    part_sizes: tuple[int, ...]
    """Rows of each part as it is stored, whether they belong to this column or not."""
    part_of_row: npt.NDArray[np.int32]
    row_in_part: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int32] | None
    """Values per row where the column is jagged; None where it is not."""

    @classmethod
    def of_part(cls, part: Any, rows: int, lengths: npt.NDArray[np.int32] | None) -> RemoteColumn:
        """The column that one stored part is."""
        return cls((part,), (rows,), np.zeros(rows, dtype=np.int32), np.arange(rows, dtype=np.int32), lengths)

    def __len__(self) -> int:
        return len(self.part_of_row)

    def take(self, rows: Index) -> RemoteColumn:
        """These rows, in this order, with only the parts that they need."""
        old_parts = self.part_of_row[rows]
        if len(rows) and bool((old_parts == old_parts[0]).all()):
            used, part_of_row = old_parts[:1], np.zeros_like(old_parts)  # the usual case: a shard as it was made
        else:
            used, positions = np.unique(old_parts, return_inverse=True)
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

    def describe(self) -> str:
        """Kind and size of the column, for messages."""
        kind = "" if self.lengths is None else f", {int(self.lengths.sum())} values"
        return f"stored, {len(self)} rows{kind} in {len(self.parts)} parts"
