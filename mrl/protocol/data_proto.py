"""DataProto: the rows that flow through a step, as a set of columns.

Columns are tensors, jagged columns (one sequence per row, without padding), numpy arrays of Python objects, or
*stored*: the driver knows their rows and lengths, while the values stay where they were created. Every row has an id.
Rows are matched by ids, never by position.

Operations return new batches and never change a column in place: columns may be views of each other or of shared
read-only memory. Clone a column before writing to it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mrl.errors import BatchError, did_you_mean
from mrl.protocol.batch_file import read_batch, write_batch
from mrl.protocol.columns import (
    AnyColumn,
    Index,
    Jagged,
    Lengths,
    RemoteColumn,
    as_column,
    concat,
    describe,
    from_torch,
    take,
)

if TYPE_CHECKING:
    from tensordict import TensorDict


class Table:
    """Columns with equal numbers of rows, and access to them."""

    def __init__(self, columns: Mapping[str, AnyColumn], row_ids: Index, meta_info: dict[str, Any]) -> None:
        """Create a table from columns of any kind, after checking their row counts and the ids."""
        rising = bool((row_ids[1:] > row_ids[:-1]).all())  # the usual case, and cheaper to check than uniqueness
        if not rising and len(np.unique(row_ids)) != len(row_ids):
            ids, counts = np.unique(row_ids, return_counts=True)
            raise BatchError(f"row ids must be unique; duplicates: {ids[counts > 1][:8].tolist()}")
        for name, column in columns.items():
            if len(column) != len(row_ids):
                other_names = ", ".join(f"`{other}`" for other in columns if other != name) or "the row ids"
                raise BatchError(
                    f"column `{name}` has {len(column)} rows ({describe(column)}), "
                    f"but {other_names} have {len(row_ids)}",
                    fix="give every column one entry per row",
                )
        self._tensors = {name: column for name, column in columns.items() if isinstance(column, (Tensor, Jagged))}
        self.non_tensor_batch = {name: column for name, column in columns.items() if isinstance(column, np.ndarray)}
        self.stored = {name: column for name, column in columns.items() if isinstance(column, RemoteColumn)}
        self.row_ids = row_ids
        self.meta_info = meta_info

    @cached_property
    def batch(self) -> TensorDict:
        """The local tensors, with nested tensors for jagged columns.

        Created on first use; from then on, changes to it count.
        """
        from tensordict import TensorDict  # the import takes seconds, and most processes do not need it

        tensors: dict[str, Tensor] = {}
        offsets: dict[bytes, Tensor] = {}  # torch can only add nested tensors with the same offsets object
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
        tensors = self._tensors
        if self._is_batch_made():
            tensors = {name: from_torch(tensor, name) for name, tensor in self.batch.items()}
        return {**tensors, **self.non_tensor_batch, **self.stored}

    def __getitem__(self, name: str) -> Any:
        """Return a local column: a tensor, a `Jagged`, or an array of objects. Raise an error on a stored column."""
        columns = self.columns()
        if name not in columns:
            raise BatchError(f"there is no column `{name}`", fix=did_you_mean(name, columns))
        column = columns[name]
        if isinstance(column, RemoteColumn):
            raise BatchError(
                f"column `{name}` is not local ({column.describe()})", fix="fetch it first, if the driver needs it"
            )
        return column

    def values(self, name: str) -> Tensor:
        """Return the concatenated values of a jagged column."""
        return self._jagged(name).values

    def lengths(self, name: str) -> Lengths:
        """Return the row lengths of a jagged column, local or stored."""
        column = self.stored.get(name)
        return self._jagged(name).lengths if column is None or column.lengths is None else column.lengths

    def _is_batch_made(self) -> bool:
        return "batch" in self.__dict__

    def _jagged(self, name: str) -> Jagged:
        column = self[name]
        if not isinstance(column, Jagged):
            raise BatchError(f"only jagged columns have row lengths and values; `{name}` is {describe(column)}")
        return column

    def _expect_here(self, names: Iterable[str], action: str) -> None:
        for name in names:
            if (column := self.stored.get(name)) is not None:
                fix = "fetch the batch first (mrl.controller.transport.fetch)"
                raise BatchError(f"column `{name}` is not local ({column.describe()}) and cannot {action}", fix=fix)

    def _drop(self, name: str) -> None:
        for columns in (self._tensors, self.non_tensor_batch, self.stored):
            columns.pop(name, None)
        if self._is_batch_made():
            self.batch.pop(name, None)


class DataProto(Table):
    """Rows and their columns. Create one with `from_dict`."""

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Tensor | Jagged] | None = None,
        non_tensors: Mapping[str, Sequence[Any]] | None = None,
        meta_info: Mapping[str, Any] | None = None,
        row_ids: npt.ArrayLike | None = None,
    ) -> DataProto:
        """Return a batch of these columns. Without `row_ids`, rows are numbered from 0."""
        columns = {name: as_column(values, name) for name, values in {**(tensors or {}), **(non_tensors or {})}.items()}
        if row_ids is None:
            row_ids = np.arange(len(next(iter(columns.values()))) if columns else 0)
        return cls(columns, np.asarray(row_ids, dtype=np.int64), dict(meta_info or {}))

    @classmethod
    def from_single_dict(
        cls,
        data: Mapping[str, Tensor | Jagged | Sequence[Any]],
        meta_info: Mapping[str, Any] | None = None,
        row_ids: npt.ArrayLike | None = None,
    ) -> DataProto:
        """Return a batch of these columns: tensors stay tensors, arrays and lists become columns of objects."""
        for name, values in data.items():
            if isinstance(values, str | bytes) or not isinstance(values, Tensor | Jagged | np.ndarray | Sequence):
                problem = f"column `{name}` is a {type(values).__name__}, not one value per row"
                raise BatchError(
                    problem, fix="pass a tensor, an array or a list; use meta_info for values that are not per row"
                )
        tensors = {name: values for name, values in data.items() if isinstance(values, Tensor | Jagged)}
        objects = {name: values for name, values in data.items() if not isinstance(values, Tensor | Jagged)}
        return cls.from_dict(tensors, objects, meta_info, row_ids)

    def with_column(self, name: str, values: Tensor | Jagged | Sequence[Any]) -> DataProto:
        """Return these rows with this column, one entry per row in order. It replaces a column of the same name."""
        return DataProto({**self.columns(), name: as_column(values, name)}, self.row_ids, dict(self.meta_info))

    def union(self, other: DataProto) -> DataProto:
        """Return these rows with the columns of both batches.

        Rows are matched by id; both batches must have the same ids.
        """
        own_columns, added_columns = self.columns(), other.columns()
        if common := sorted(set(own_columns) & set(added_columns)):
            raise BatchError(
                f"both batches have a column `{common[0]}`: {describe(own_columns[common[0]])} and "
                f"{describe(added_columns[common[0]])}",
                fix=f'pop("{common[0]}") from one of them first',
            )
        meta_info = _merge_meta_info([self.meta_info, other.meta_info])
        index = _positions(other.row_ids, self.row_ids)
        other_columns = (
            added_columns if index is None else {name: take(column, index) for name, column in added_columns.items()}
        )
        return DataProto({**own_columns, **other_columns}, self.row_ids, meta_info)

    def select(self, *names: str) -> DataProto:
        columns = self.columns()
        for name in names:
            if name not in columns:
                raise BatchError(f"there is no column `{name}` to select", fix=did_you_mean(name, columns))
        return DataProto({name: columns[name] for name in names}, self.row_ids, dict(self.meta_info))

    def pop(self, *names: str) -> DataProto:
        """Remove the named columns from this batch and return them as another batch."""
        popped = self.select(*names)
        for name in names:
            self._drop(name)
        return popped

    def rename(self, old: str | Sequence[str], new: str | Sequence[str]) -> DataProto:
        """Return these rows with new names for some columns. Names may be swapped."""
        before, after = [[names] if isinstance(names, str) else list(names) for names in (old, new)]
        columns = self.columns()
        if len(before) != len(after):
            raise BatchError(f"{len(before)} columns cannot get {len(after)} names: {before} and {after}")
        for name in before:
            if name not in columns:
                raise BatchError(f"there is no column `{name}` to rename", fix=did_you_mean(name, columns))
        self._expect_here(before, "be renamed: it is stored under its name")
        names = dict(zip(before, after, strict=True))
        renamed = [names.get(name, name) for name in columns]
        if duplicate := next((name for name in renamed if renamed.count(name) > 1), None):
            raise BatchError(f"two columns would have the name `{duplicate}`", fix=f'pop("{duplicate}") first')
        return DataProto(dict(zip(renamed, columns.values(), strict=True)), self.row_ids, dict(self.meta_info))

    def take(self, rows: npt.ArrayLike) -> DataProto:
        """Return the rows at these positions, in this order, with their ids."""
        index = np.asarray(rows, dtype=np.int64)
        if len(index) and (index.min() < -len(self) or index.max() >= len(self)):
            raise BatchError(f"row {int(index.max())} does not exist: there are {len(self)} rows")
        return self._rows(index % len(self) if len(index) else index)

    def repeat(self, times: int) -> DataProto:
        """Return every row `times` times in a row. Copy k of row id r gets the id r x times + k."""
        if times < 1:
            raise BatchError(f"rows cannot be repeated {times} times")
        index = np.repeat(np.arange(len(self)), times)
        columns = {name: take(column, index) for name, column in self.columns().items()}
        row_ids = self.row_ids[index] * times + np.tile(np.arange(times), len(self))
        return DataProto(columns, row_ids, dict(self.meta_info))

    def split(self, sizes: Sequence[int]) -> list[DataProto]:
        """Return consecutive pieces with these numbers of rows."""
        if sum(sizes) != len(self) or any(size < 0 for size in sizes):
            raise BatchError(f"the sizes {list(sizes)} sum to {sum(sizes)}, but there are {len(self)} rows")
        if len(sizes) == 1:
            return [self.select(*self.columns())]
        ends = np.cumsum(sizes).tolist()
        return [self._rows(slice(end - size, end)) for size, end in zip(sizes, ends, strict=True)]

    def _rows(self, rows: Index | slice) -> DataProto:
        columns = {name: take(column, rows) for name, column in self.columns().items()}
        return DataProto(columns, self.row_ids[rows], dict(self.meta_info))

    def chunk(self, num_chunks: int) -> list[DataProto]:
        """Return consecutive pieces whose numbers of rows differ by at most one. Empty pieces raise an error."""
        if not 1 <= num_chunks <= len(self):
            raise BatchError(
                f"{len(self)} rows cannot be split into {num_chunks} shards: each needs at least one row",
                fix=f"use at least {num_chunks} rows, or a smaller data-parallel size",
            )
        small, extra = divmod(len(self), num_chunks)
        return self.split([small + (piece < extra) for piece in range(num_chunks)])

    def make_iterator(
        self, mini_batch_size: int, epochs: int, seed: int | None = None, *, shuffle: bool = False
    ) -> Iterator[DataProto]:
        """Return the mini-batches of these epochs. With `shuffle`, each epoch has its own order, from `seed`."""
        if mini_batch_size < 1 or epochs < 1 or len(self) % mini_batch_size:
            problem = f"{len(self)} rows cannot be divided into mini-batches of {mini_batch_size} over {epochs} epochs"
            raise BatchError(problem, fix="use a divisor of the number of rows, and at least one epoch")
        if shuffle and seed is None:
            raise BatchError("shuffled mini-batches need a seed", fix="pass seed=0, or any other number")
        generator, size = np.random.default_rng(seed), mini_batch_size
        orders = (generator.permutation(len(self)) if shuffle else np.arange(len(self)) for _ in range(epochs))
        return (self.take(order[at : at + size]) for order in orders for at in range(0, len(self), size))

    def save_to_disk(self, path: str | Path) -> None:
        """Write columns, row ids and meta_info to a file for `load_from_disk`. The file contains no code."""
        self._expect_here(self.columns(), "be written")
        try:
            is_json = json.loads(json.dumps(self.meta_info)) == self.meta_info
        except (TypeError, ValueError):
            is_json = False
        if not is_json:
            fix = "use strings, numbers, booleans, lists, and dicts with text as keys"
            raise BatchError(f"meta_info is not JSON: {self.meta_info!r:.200}", where=str(path), fix=fix)
        write_batch(Path(path), self.columns(), self.row_ids, self.meta_info)

    @classmethod
    def load_from_disk(cls, path: str | Path) -> DataProto:
        """Return the batch written by `save_to_disk`. A missing or damaged file raises a `WireError`."""
        columns, row_ids, meta_info = read_batch(Path(path))
        return cls(columns, row_ids, meta_info)

    @classmethod
    def concat(cls, batches: Sequence[DataProto]) -> DataProto:
        """Return the concatenated rows of all batches."""
        if not batches:
            raise BatchError("there is nothing to concatenate")
        names = list(batches[0].columns())
        for number, batch in enumerate(batches):
            if set(batch.columns()) != set(names):
                odd = ", ".join(f"`{name}`" for name in sorted(set(names) ^ set(batch.columns())))
                raise BatchError(f"batches 0 and {number} have different columns: only one of them has {odd}")
        row_ids = np.concatenate([batch.row_ids for batch in batches])
        if len(np.unique(row_ids)) != len(row_ids):
            raise BatchError("some rows are in more than one batch", fix="give different rows different row_ids")
        parts = [batch.columns() for batch in batches]
        merged = {name: concat([columns[name] for columns in parts], name) for name in names}
        return cls(merged, row_ids, _merge_meta_info([batch.meta_info for batch in batches]))


def _merge_meta_info(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            if key in merged and merged[key] != value:
                raise BatchError(
                    f"meta_info `{key}` differs between batches: {merged[key]!r} and {value!r}",
                    fix="keep it in one of them only",
                )
            merged[key] = value
    return merged


def _positions(row_ids: Index, wanted: Index) -> Index | None:
    """Return the positions of the wanted ids in `row_ids`; None if both are equal."""
    if np.array_equal(row_ids, wanted):
        return None
    missing, extra = np.setdiff1d(wanted, row_ids), np.setdiff1d(row_ids, wanted)
    if len(missing) or len(extra):
        raise BatchError(
            f"the batches have different rows: {len(missing)} ids are missing {missing[:8].tolist()}, "
            f"{len(extra)} are not expected {extra[:8].tolist()}",
            fix="take or concat rows so that both sides have the same ids",
        )
    order = np.argsort(row_ids)
    return order[np.searchsorted(row_ids, wanted, sorter=order)]
