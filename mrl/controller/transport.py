"""How columns travel between workers: as references through the driver, as bytes past it.

What a worker wrote in one call is one object in the store of its node, a bundle of columns. The driver keeps the
reference, the row lengths, and columns with one number per row; the next worker reads the object in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import ray
from ray import ObjectRef
from torch import Tensor

from mrl.errors import BatchError, WireError
from mrl.protocol import DataProto, RemoteColumn
from mrl.protocol import columns as column_ops
from mrl.protocol.columns import Column, Index
from mrl.protocol.wire import Wire, decode, encode

_INLINE_BYTES = 64 * 1024
"""A smaller column rides in the call itself: a visit to the object store costs more than it saves."""


Bundle: TypeAlias = dict[str, Wire]
"""The columns of one stored object, by name."""

ColumnPlan: TypeAlias = list[Any]
"""How a worker puts one column together, in values that Ray sends without pickling them:
`[wire]` where its bytes ride along, `[None, parts]` where it is one stored part as it stands, and
`[None, parts, part_of_row, row_in_part]` (as bytes) where its rows come from several. `parts` are positions among
the call's object arguments."""

ShardPlan: TypeAlias = list[Any]
"""The rows of one data-parallel shard, as a worker is told of them: `[row_ids as bytes, meta_info, {column: plan}]`."""


@dataclass
class Answer:
    """What comes back to the driver with a shard's columns, which are separate objects beside it."""

    meta_info: dict[str, Any] = field(default_factory=dict)
    lengths: dict[str, npt.NDArray[np.int32] | None] = field(default_factory=dict)
    scalars: dict[str, Wire] = field(default_factory=dict)


def plan_shard(shard: DataProto, reads: Sequence[str]) -> tuple[ShardPlan, list[ObjectRef]]:
    """What to send for one shard: the plan, and the objects that it refers to. What is large here is stored."""
    columns = shard.columns()
    references: dict[ObjectRef, int] = {}
    plans: dict[str, ColumnPlan] = {}
    to_store: Bundle = {}
    for name in reads:
        column = columns[name]
        if isinstance(column, RemoteColumn):
            parts = [references.setdefault(part, len(references)) for part in column.parts]
            where = [] if column.is_whole_part() else [column.part_of_row.tobytes(), column.row_in_part.tobytes()]
            plans[name] = [None, parts, *where]
        elif (wire := encode(column, name)).nbytes <= _INLINE_BYTES:
            plans[name] = [[wire.head.tobytes(), wire.body.tobytes()]]
        else:
            to_store[name] = wire
    if to_store:
        part = references.setdefault(ray.put(to_store), len(references))
        plans |= {name: [None, [part]] for name in to_store}
    return [shard.row_ids.tobytes(), shard.meta_info, plans], list(references)


def assemble_shard(plan: ShardPlan, objects: Sequence[Bundle]) -> DataProto:
    """The shard's batch, in the worker. A column that is one whole part is read where it lies."""
    row_ids, meta_info, plans = plan
    columns = {name: _assemble_column(name, column, objects) for name, column in plans.items()}
    return DataProto(columns, np.frombuffer(row_ids, dtype=np.int64), meta_info)


def _assemble_column(name: str, plan: ColumnPlan, objects: Sequence[Bundle]) -> Column:
    match plan:
        case [[head, body]]:
            return decode(Wire(np.frombuffer(head, dtype=np.uint8), np.frombuffer(body, dtype=np.uint8)))
        case [None, [part]]:
            return decode(objects[part][name])
        case [None, parts, part_of_row, row_in_part]:
            rows = (np.frombuffer(index, dtype=np.int32) for index in (part_of_row, row_in_part))
            return column_ops.gather([decode(objects[part][name]) for part in parts], *rows)
    raise WireError(f"not the plan of a column: {plan!r}")


def pack_answer(result: DataProto, row_ids: Index, writes: Sequence[str], method: str) -> tuple[Answer, Bundle]:
    """What a worker sends back for a batch that a method returned, after checking that it is what was promised."""
    columns = result.columns()
    if set(columns) != set(writes):
        unwritten, undeclared = sorted(set(writes) - set(columns)), sorted(set(columns) - set(writes))
        raise BatchError(
            f"{method} promises to write {list(writes)} but returned {sorted(columns)}"
            + (f"; missing {unwritten}" if unwritten else "")
            + (f"; undeclared {undeclared}" if undeclared else ""),
            fix="make @register(writes=...) and the returned columns agree",
        )
    if not np.array_equal(result.row_ids, row_ids):
        raise BatchError(
            f"{method} returned other rows than it was given", fix="return one row for each, with its row_ids"
        )
    answer, bundle = Answer(meta_info=result.meta_info), Bundle()
    for name in writes:
        column = result[name]
        if _is_number_per_row(column):
            answer.scalars[name] = encode(column, name)
        else:
            bundle[name] = encode(column, name)
            answer.lengths[name] = _lengths(column)
    return answer, bundle


def unpack_answer(answer: Answer, bundle: ObjectRef, row_ids: Index) -> DataProto:
    """A shard's answer as a batch on the driver: numbers per row are here, everything else stays stored."""
    columns: dict[str, Column | RemoteColumn] = {name: decode(wire) for name, wire in answer.scalars.items()}
    for name, lengths in answer.lengths.items():
        columns[name] = RemoteColumn.of_part(bundle, len(row_ids), lengths)
    return DataProto(columns, row_ids, answer.meta_info)


def store(batch: DataProto) -> DataProto:
    """The same batch with its jagged and object columns in the object store, so that calls pass on references only."""
    columns = batch.columns()
    here = {
        name: column
        for name, column in columns.items()
        if not isinstance(column, RemoteColumn) and not _is_number_per_row(column)
    }
    bundle = ray.put({name: encode(column, name) for name, column in here.items()})
    stored = {name: RemoteColumn.of_part(bundle, len(batch), _lengths(column)) for name, column in here.items()}
    return DataProto({**columns, **stored}, batch.row_ids, dict(batch.meta_info))


def fetch(batch: DataProto, timeout_s: float) -> DataProto:
    """The same batch with every stored column brought here: for samples to show and for tests. A step needs none."""
    plan, references = plan_shard(batch, list(batch.columns()))
    return assemble_shard(plan, ray.get(references, timeout=timeout_s))


def _is_number_per_row(column: Column) -> bool:
    return isinstance(column, Tensor) and column.dim() == 1 and not column.is_nested


def _lengths(column: Column) -> npt.NDArray[np.int32] | None:
    return column_ops.row_lengths(column) if column_ops.is_jagged(column) else None
