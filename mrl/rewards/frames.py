"""What travels between the run, the supervisor and its workers: a ticket, a length and that many bytes of JSON."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

from mrl.errors import RewardError

CONTROL = 0  # the ticket of what belongs to no sample
MAX_SAMPLE_BYTES = 64 << 20
MAX_REPLY_BYTES = 64 << 10
_HEADER = struct.Struct(">QI")


class FrameError(RewardError):
    """Bytes that are no frame, or a frame that is longer than allowed."""


def frame(ticket: int, body: bytes) -> bytes:
    """The bytes of one frame."""
    return _HEADER.pack(ticket, len(body)) + body


def control(**values: Any) -> bytes:
    """A frame that belongs to no sample."""
    return frame(CONTROL, to_json(values))


def to_json(value: Any) -> bytes:
    """JSON as bytes; ASCII, so that half a surrogate pair in a response comes through as it is."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


class FrameReader:
    """Cuts a stream of bytes into frames."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Every frame that `data` completes, as ticket and body."""
        self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            ticket, length = _HEADER.unpack_from(self._buffer)
            if length > self._most_bytes:
                raise FrameError(f"a frame of {length} bytes; at most {self._most_bytes}")
            end = _HEADER.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            yield ticket, body
