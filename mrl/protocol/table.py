"""Named columns over rows that have ids, in both forms in which they are used: packed, and as torch knows them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mrl.errors import BatchError, did_you_mean
from mrl.protocol.columns import AnyColumn, Index, Jagged, Lengths, RemoteColumn, describe, from_torch

if TYPE_CHECKING:
    from tensordict import TensorDict


class Table:
    """Columns of equal numbers of rows, and how to get at them."""

    def __init__(self, columns: Mapping[str, AnyColumn], row_ids: Index, meta_info: dict[str, Any]) -> None:
        """Ready columns of any kind; their row counts and the ids are checked."""
        rising = bool((row_ids[1:] > row_ids[:-1]).all())  # the usual case, and cheaper to see than uniqueness
        if not rising and len(np.unique(row_ids)) != len(row_ids):
            ids, counts = np.unique(row_ids, return_counts=True)
            raise BatchError(f"row ids must be unique; given twice or more: {ids[counts > 1][:8].tolist()}")
        for name, column in columns.items():
            if len(column) != len(row_ids):
                others = ", ".join(f"`{other}`" for other in columns if other != name) or "the row ids"
                raise BatchError(
                    f"column `{name}` has {len(column)} rows ({describe(column)}), but {others} have {len(row_ids)}",
                    fix="every column of a batch has one entry per row",
                )
        self._tensors = {name: column for name, column in columns.items() if isinstance(column, (Tensor, Jagged))}
        self.non_tensor_batch = {name: column for name, column in columns.items() if isinstance(column, np.ndarray)}
        self.stored = {name: column for name, column in columns.items() if isinstance(column, RemoteColumn)}
        self.row_ids = row_ids
        self.meta_info = meta_info

    @cached_property
    def batch(self) -> TensorDict:
        """The tensors that are here, jagged ones nested. Made when first used; from then on it is what counts."""
        from tensordict import TensorDict  # seconds to import: processes that never ask for one do without

        tensors: dict[str, Tensor] = {}
        offsets: dict[bytes, Tensor] = {}  # torch adds nested tensors only if they have the same offsets object
        for name, column in self._tensors.items():
            if isinstance(column, Jagged):
                shared = offsets.setdefault(column.lengths.tobytes(), column.offsets())
                column = torch.nested.nested_tensor_from_jagged(column.values, shared)
            tensors[name] = column
        return TensorDict(tensors, batch_size=[len(self)])

    def __len__(self) -> int:
        return len(self.row_ids)

    def __repr__(self) -> str:
        lines = [f"  {name}: {describe(column)}" for name, column in self.columns().items()]
        return "\n".join([f"{type(self).__name__} of {len(self)} rows, meta_info {self.meta_info}", *lines])

    def columns(self) -> dict[str, AnyColumn]:
        """Return all columns by name, of whatever kind."""
        tensors = self._tensors
        if self._is_batch_made():
            tensors = {name: from_torch(tensor, name) for name, tensor in self.batch.items()}
        return {**tensors, **self.non_tensor_batch, **self.stored}

    def __getitem__(self, name: str) -> Any:
        """Return a column that is here: a tensor, a `Jagged`, or an array of objects. A stored one is an error."""
        columns = self.columns()
        if name not in columns:
            raise BatchError(f"no column `{name}`", fix=did_you_mean(name, columns))
        column = columns[name]
        if isinstance(column, RemoteColumn):
            raise BatchError(
                f"column `{name}` is not here ({column.describe()})", fix="fetch it first, if the driver must hold it"
            )
        return column

    def values(self, name: str) -> Tensor:
        """Return all rows' values of a jagged column, one after another."""
        return self._jagged(name).values

    def lengths(self, name: str) -> Lengths:
        """Return values per row of a jagged column, wherever the column is."""
        column = self.stored.get(name)
        return self._jagged(name).lengths if column is None or column.lengths is None else column.lengths

    def _is_batch_made(self) -> bool:
        return "batch" in self.__dict__

    def _jagged(self, name: str) -> Jagged:
        column = self[name]
        if not isinstance(column, Jagged):
            raise BatchError(f"only a jagged column has row lengths and values; `{name}` is {describe(column)}")
        return column

    def _drop(self, name: str) -> None:
        for columns in (self._tensors, self.non_tensor_batch, self.stored):
            columns.pop(name, None)
        if self._is_batch_made():
            self.batch.pop(name, None)
