"""A batch as one file: a JSON header, the row ids, then each column in wire format. It contains no code."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mrl import files
from mrl.errors import BatchError, WireError
from mrl.protocol.columns import AnyColumn, Column, Index, RemoteColumn
from mrl.protocol.wire import Wire, decode, encode

_LENGTH = struct.Struct("<Q")
_FORMAT = b"mrl batch 1\n"
_HASHED_FROM = len(_FORMAT) + hashlib.sha256().digest_size


def batch_to_bytes(columns: Mapping[str, AnyColumn], row_ids: Index, metadata: Any) -> bytes:
    """Return the bytes of a batch and of its metadata, which must be JSON."""
    wires = {}
    for name, column in columns.items():
        assert not isinstance(column, RemoteColumn), "written columns must be local"
        wires[name] = encode(column, name)
    header = {
        "rows": len(row_ids),
        "columns": [[name, len(wire.head), len(wire.body)] for name, wire in wires.items()],
        "told": metadata,
    }
    text = json.dumps(header).encode()
    parts = [part for wire in wires.values() for part in (wire.head, bytes(wire.body))]
    return b"".join([_LENGTH.pack(len(text)), text, row_ids.astype("<i8").tobytes(), *parts])


def batch_from_bytes(data: bytes) -> tuple[dict[str, Column], Index, Any]:
    """Return the columns of the batch, its row ids, and its metadata."""
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
                f"it has {len(data)} bytes where {at} are expected, or the columns and row ids differ in length"
            )
        return columns, row_ids, header["told"]
    except (struct.error, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise WireError(f"this is not a batch: {error}") from error


def write_batch(path: Path, columns: Mapping[str, AnyColumn], row_ids: Index, meta_info: Mapping[str, Any]) -> None:
    """Write a batch and its hash to a file, atomically."""
    content = batch_to_bytes(columns, row_ids, meta_info)
    try:
        files.write_bytes(path, _FORMAT + hashlib.sha256(content).digest() + content)
    except OSError as error:
        problem = f"cannot write the batch of {len(content):,} bytes: {error.strerror}"
        raise BatchError(
            problem, where=str(path), fix="choose a file in an existing directory with free space"
        ) from error


def read_batch(path: Path) -> tuple[dict[str, Column], Index, dict[str, Any]]:
    """Return columns, row ids and meta_info of a batch written by `write_batch`."""
    fix = "choose a file written by DataProto.save_to_disk, or save the batch again"
    try:
        data = files.read_bytes(path, path.stat().st_size)
    except OSError as error:
        raise WireError(f"cannot read the batch: {error.strerror or error}", where=str(path), fix=fix) from error
    content = data[_HASHED_FROM:]
    if not data.startswith(_FORMAT):
        raise WireError("this file is not an mrl batch", where=str(path), fix=fix)
    if data[len(_FORMAT) : _HASHED_FROM] != hashlib.sha256(content).digest():
        problem = f"the file is damaged: the hash of its {len(content):,} bytes is wrong"
        raise WireError(problem, where=str(path), fix=fix)
    return batch_from_bytes(content)
