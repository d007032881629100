"""A batch as one file: a header of JSON, the row ids, then each column as it travels. Nothing in it runs code."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np

from mrl.errors import WireError
from mrl.protocol.columns import RemoteColumn
from mrl.protocol.data_proto import DataProto, Table
from mrl.protocol.wire import Wire, decode, encode

_LENGTH = struct.Struct("<Q")


def batch_to_bytes(batch: Table, told: Any) -> bytes:
    """Return the bytes that stand for a batch on this machine, and for what is told beside it, which is JSON."""
    wires = {}
    for name, column in batch.columns().items():
        assert not isinstance(column, RemoteColumn), "what is written is here"
        wires[name] = encode(column, name)
    header = {
        "rows": len(batch.row_ids),
        "columns": [[name, len(wire.head), len(wire.body)] for name, wire in wires.items()],
        "told": told,
    }
    text = json.dumps(header).encode()
    parts = [part for wire in wires.values() for part in (wire.head, bytes(wire.body))]
    return b"".join([_LENGTH.pack(len(text)), text, batch.row_ids.astype("<i8").tobytes(), *parts])


def batch_from_bytes(data: bytes) -> tuple[DataProto, Any]:
    """Return the batch and what was told beside it."""
    try:
        (size,) = _LENGTH.unpack_from(data)
        header = json.loads(data[_LENGTH.size : _LENGTH.size + size])
        at = _LENGTH.size + size + 8 * int(header["rows"])
        row_ids = np.frombuffer(data[_LENGTH.size + size : at], "<i8").astype(np.int64)
        columns = {}
        for name, num_head, num_body in header["columns"]:
            body = np.frombuffer(data[at + num_head : at + num_head + num_body], np.uint8)
            columns[str(name)] = decode(Wire(data[at : at + num_head], body))
            at += num_head + num_body
        if at != len(data) or any(len(column) != len(row_ids) for column in columns.values()):
            raise ValueError(
                f"{len(data)} bytes are there, {at} are told of, or columns of other lengths than the rows"
            )
        return DataProto(columns, row_ids, {}), header["told"]
    except (struct.error, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise WireError(f"this is not a batch: {error}") from error
