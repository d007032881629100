"""Columns between workers: references travel through the driver, the bytes do not.

The columns that a worker writes in one call are one object in its node's store. The driver keeps the reference, the row
lengths, and columns with one number per row. The next worker reads the object in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import ray
from ray import ObjectRef
from ray.exceptions import ObjectStoreFullError, OutOfDiskError
from torch import Tensor

from mrl.errors import BatchError, SetupError, WireError
from mrl.protocol import DataProto, RemoteColumn
from mrl.protocol.columns import AnyColumn, Column, Index, Jagged, gather
from mrl.protocol.wire import Wire, decode, encode

_INLINE_BYTES = 64 * 1024
"""Smaller columns are part of the call itself: the object store would cost more than it saves."""


# Ray sends lists, bytes, strings and numbers without pickle.
ColumnStore: TypeAlias = dict[str, list[Any]]
"""Columns of one stored object, by name: `[head, body]`."""

ColumnPlan: TypeAlias = list[Any]
"""Instructions for a worker to assemble one column.

`[head, body]` for inline bytes, `[parts]` for one complete stored part, `[parts, rows as bytes]` for these rows of the
parts, numbered consecutively. `parts` are positions among the object arguments of the call.
"""

ShardPlan: TypeAlias = list[Any]
"""Rows of one data-parallel shard, as sent to a worker: `[row_ids as bytes, meta_info, {column: plan}]`."""

ShardResult: TypeAlias = list[Any]
"""Answer to the driver about a shard's stored columns, which are a separate object.

`[meta_info, {stored column: its row lengths as bytes, or None}, {column with a number per row: [head, body]}]`
"""


def plan_shard(shard: DataProto, reads: Sequence[str]) -> tuple[ShardPlan, list[ObjectRef]]:
    """Return a shard's plan and the objects that it refers to. Large local columns are put into the store."""
    columns = shard.columns()
    references: dict[ObjectRef, int] = {}
    plans: dict[str, ColumnPlan] = {}
    to_store: ColumnStore = {}
    for name in reads:
        column = columns[name]
        if isinstance(column, RemoteColumn):
            parts = [references.setdefault(part, len(references)) for part in column.parts]
            plans[name] = [parts] if column.is_whole_part() else [parts, column.rows_among_parts().tobytes()]
        elif (wire := encode(column, name)).nbytes <= _INLINE_BYTES:
            plans[name] = [wire.head, bytes(wire.body)]
        else:
            to_store[name] = list(wire)
    if to_store:
        part = references.setdefault(_put(to_store), len(references))
        plans |= {name: [[part]] for name in to_store}
    return [shard.row_ids.tobytes(), shard.meta_info, plans], list(references)


def assemble_shard(plan: ShardPlan, objects: Sequence[ColumnStore]) -> DataProto:
    """Return the shard's batch, in the worker. A column of one complete part is read in place."""
    row_ids, meta_info, plans = plan
    columns = {name: _assemble_column(name, column, objects) for name, column in plans.items()}
    return DataProto(columns, np.frombuffer(row_ids, dtype=np.int64), meta_info)


def _assemble_column(name: str, plan: ColumnPlan, objects: Sequence[ColumnStore]) -> Column:
    match plan:
        case [bytes(head), body]:
            return decode(Wire(head, body))
        case [[part]]:
            return decode(Wire(*objects[part][name]))
        case [parts, rows]:
            columns = [decode(Wire(*objects[part][name])) for part in parts]
            return gather(columns, np.frombuffer(rows, dtype=np.int64), name)
    raise WireError(f"this is not a column plan: {plan!r}")


def pack_result(
    result: DataProto, row_ids: Index, writes: Sequence[str], method: str
) -> tuple[ShardResult, ColumnStore]:
    """Return the answer of a worker to the driver, after checking that the columns match the declaration."""
    columns = result.columns()
    if set(columns) != set(writes):
        unwritten, undeclared = sorted(set(writes) - set(columns)), sorted(set(columns) - set(writes))
        raise BatchError(
            f"{method} declares {list(writes)} but returned {sorted(columns)}"
            + (f"; missing {unwritten}" if unwritten else "")
            + (f"; undeclared {undeclared}" if undeclared else ""),
            fix="make @register(writes=...) match the returned columns",
        )
    if not np.array_equal(result.row_ids, row_ids):
        raise BatchError(
            f"{method} returned different rows from its input",
            fix="return one row for each input row, with its row_ids",
        )
    written: ColumnStore = {}
    lengths: dict[str, bytes | None] = {}
    numbers: dict[str, list[Any]] = {}
    for name in writes:
        column = result[name]
        wire = encode(column, name)
        if _is_number_per_row(column):
            numbers[name] = [wire.head, bytes(wire.body)]
        else:
            written[name] = list(wire)
            lengths[name] = column.lengths.tobytes() if isinstance(column, Jagged) else None
    return [result.meta_info, lengths, numbers], written


def unpack_result(answer: ShardResult, part: ObjectRef, row_ids: Index) -> DataProto:
    """Return a shard's answer as a batch on the driver.

    Numbers per row are local, all other columns stay in the store.
    """
    meta_info, lengths, numbers = answer
    columns: dict[str, AnyColumn] = {name: decode(Wire(*wire)) for name, wire in numbers.items()}
    for name, packed in lengths.items():
        per_row = None if packed is None else np.frombuffer(packed, dtype=np.int32)
        columns[name] = RemoteColumn.of_part(part, len(row_ids), per_row)
    return DataProto(columns, row_ids, meta_info)


def store(batch: DataProto) -> DataProto:
    """Return the batch with its jagged and object columns in the object store, so that calls only pass references."""
    columns = batch.columns()
    local = {
        name: column
        for name, column in columns.items()
        if not isinstance(column, RemoteColumn) and not _is_number_per_row(column)
    }
    part = _put(bundle(local))
    for name, column in local.items():
        per_row = column.lengths if isinstance(column, Jagged) else None
        columns[name] = RemoteColumn.of_part(part, len(batch), per_row)
    return DataProto(columns, batch.row_ids, dict(batch.meta_info))


def bundle(columns: Mapping[str, Column]) -> ColumnStore:
    """Return columns as one object for the store."""
    return {name: list(encode(column, name)) for name, column in columns.items()}


def _put(columns: ColumnStore) -> ObjectRef:
    try:
        return ray.put(columns)
    except (ObjectStoreFullError, OutOfDiskError) as error:
        num_bytes = sum(len(body) for _, body in columns.values())
        raise SetupError(
            f"Ray's object store is full: {num_bytes / 2**20:.1f} MiB of {', '.join(columns)} do not fit into it"
            f" or onto its disk ({type(error).__name__})",
            fix="enlarge /dev/shm (docker: --shm-size) and the disk of TMPDIR; for a cluster that mrl did not start, "
            "use `ray start --object-store-memory`",
        ) from error


def fetch(batch: DataProto, timeout_s: float) -> DataProto:
    """Return the batch with all columns local, for displayed samples and tests. Steps do not need this."""
    plan, references = plan_shard(batch, list(batch.columns()))
    # Without references, `ray.get` would start a cluster if none has been joined.
    return assemble_shard(plan, ray.get(references, timeout=timeout_s) if references else [])


def _is_number_per_row(column: Column) -> bool:
    return isinstance(column, Tensor) and column.dim() == 1
