"""Wire format of columns: a short head and one contiguous body that is read in place, without pickle.

    head: magic, header length | header (JSON) | row lengths, int32 (jagged only)       body: values

The body is the column's own memory, so storing it is its only copy: an object store puts head and body into one object.
Derived data are not sent: offsets follow from lengths, an all-true mask from its number of values. Every size is
checked before it is used.
"""

from __future__ import annotations

import json
import math
import struct
import warnings
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mrl.dtypes import ITEM_BYTES, dtype_name, torch_dtype
from mrl.errors import BatchError, WireError
from mrl.protocol.columns import Column, Jagged, Lengths, Objects, object_array

Buffer: TypeAlias = bytes | npt.NDArray[np.uint8]


class Wire(NamedTuple):
    head: bytes
    body: Buffer

    @property
    def nbytes(self) -> int:
        return len(self.head) + len(self.body)


_MAGIC = b"mrl1"
_PREFIX = struct.Struct("<4sI")
_MAX_HEADER_BYTES = 1 << 16

# Buffers from an object store are read-only, and torch warns once per process that it cannot know this.
# Columns are never changed in place (see DataProto), so trigger the warning here and suppress it.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


def encode(column: Column, name: str) -> Wire:
    """Return the bytes of a column. The body may share the column's memory."""
    if isinstance(column, np.ndarray):
        return _encode_objects(column, name)
    lengths, values = (column.lengths, column.values) if isinstance(column, Jagged) else (None, column)
    values = values.detach().cpu().contiguous()
    dtype = dtype_name(values.dtype)
    if dtype not in ITEM_BYTES:
        raise BatchError(
            f"column `{name}` has dtype {dtype}, which cannot be sent", fix=f"use one of {', '.join(ITEM_BYTES)}"
        )
    header: dict[str, Any] = {
        "kind": "dense" if lengths is None else "jagged",
        "dtype": dtype,
        "shape": list(values.shape),
    }
    if lengths is not None:
        header["rows"] = len(lengths)
    if lengths is not None and values.dtype == torch.bool and values.dim() == 1 and bool(values.numpy().all()):
        header["constant"] = True
        return Wire(_head(header, lengths), b"")
    return Wire(_head(header, lengths), values.view(-1).view(torch.uint8).numpy() if values.numel() else b"")


def _encode_objects(column: Objects, name: str) -> Wire:
    try:
        text = json.dumps(column.tolist(), ensure_ascii=False, allow_nan=False).encode("utf-8", "surrogatepass")
    except (TypeError, ValueError) as error:
        raise BatchError(
            f"column `{name}` cannot be sent: {error}",
            fix="use JSON values in object columns: strings, numbers, booleans, lists, dicts",
        ) from error
    header = {"kind": "objects", "rows": len(column), "bytes": len(text)}
    return Wire(_head(header, None), np.frombuffer(text, dtype=np.uint8))


def _head(header: dict[str, Any], lengths: Lengths | None) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    return _PREFIX.pack(_MAGIC, len(text)) + text + (b"" if lengths is None else lengths.tobytes())


def decode(wire: Wire) -> Column:
    """Return the column of these bytes. Tensors share the body's memory and must not be written to."""
    header, rest = _read_header(wire.head)
    try:
        kind = header["kind"]
        if kind == "objects":
            return _decode_objects(wire.body, int(header["rows"]), int(header["bytes"]))
        if kind not in ("dense", "jagged"):
            raise WireError(f'unknown column kind "{kind}"')
        rows = int(header["rows"]) if kind == "jagged" else None
        shape = [int(size) for size in header["shape"]]
        dtype = torch_dtype(header["dtype"])
    except (KeyError, TypeError, ValueError) as error:
        raise WireError(f"the column's header is incomplete: {error!r}") from error
    if rows is None:
        return _read_values(wire.body, shape, dtype)
    lengths = _read_lengths(rest, rows)
    total = int(lengths.sum(dtype=np.int64))
    if not shape or (rows and int(lengths.min()) < 0) or total != shape[0]:
        raise WireError(f"the row lengths sum to {total}, but the column has shape {shape}")
    if header.get("constant") and shape == [total]:
        return Jagged(torch.ones(total, dtype=torch.bool), lengths)
    return Jagged(_read_values(wire.body, shape, dtype), lengths)


def _read_header(head: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the header and the rest of the head."""
    if len(head) < _PREFIX.size:
        raise WireError(f"{len(head)} bytes are too few for a column")
    magic, size = _PREFIX.unpack_from(head)
    if magic != _MAGIC:
        raise WireError(f"this is not a column in this format: it begins with {magic!r}, not {_MAGIC!r}")
    if size > _MAX_HEADER_BYTES or _PREFIX.size + size > len(head):
        raise WireError(f"the header claims {size} bytes of a head of {len(head)}")
    try:
        header = json.loads(head[_PREFIX.size : _PREFIX.size + size])
    except ValueError as error:
        raise WireError(f"the column's header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise WireError("the column's header is not a JSON object")
    return header, head[_PREFIX.size + size :]


def _read_lengths(section: bytes, rows: int) -> Lengths:
    if rows < 0 or rows * 4 != len(section):
        raise WireError(f"{rows} row lengths do not match the {len(section)} bytes after the header")
    return np.frombuffer(section, dtype=np.int32)


def _read_values(section: Buffer, shape: list[int], dtype: torch.dtype) -> Tensor:
    if any(size < 0 for size in shape):
        raise WireError(f"a column cannot have shape {shape}")
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes != len(section):
        raise WireError(f"shape {shape} of {dtype} takes {num_bytes} bytes, but there are {len(section)}")
    if not num_bytes:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(section, dtype=dtype).view(shape)


def _decode_objects(section: Buffer, rows: int, num_bytes: int) -> Objects:
    if num_bytes != len(section):
        raise WireError(f"an object column should have {num_bytes} bytes, but has {len(section)}")
    try:
        items = json.loads(bytes(section).decode("utf-8", "surrogatepass"))
    except ValueError as error:
        raise WireError(f"an object column is not JSON: {error}") from error
    if not isinstance(items, list) or len(items) != rows:
        raise WireError(f"an object column should be a list of {rows} rows, but is not")
    return object_array(items)
