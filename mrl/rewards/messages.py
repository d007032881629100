"""Messages between the run, the supervisor and its workers: a ticket, a length, and that many bytes of JSON.

`multiprocessing.connection` would block the supervisor on a worker that sends half a message, or does not read.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from mrl.config.reward import RewardConfig, RewardFunctionConfig
from mrl.errors import RewardError

CONTROL = 0  # ticket of messages that belong to no sample
GOES_ON = b'{"step":'  # beginning of a body whose ticket stays with its worker
MAX_SAMPLE_BYTES = 64 << 20
MAX_REPLY_BYTES = 64 << 10
_HEADER = struct.Struct(">QI")


class FrameError(RewardError):
    """Bytes that are not a frame, or a frame longer than allowed."""


def frame(ticket: int, body: bytes) -> bytes:
    return _HEADER.pack(ticket, len(body)) + body


def control(**values: Any) -> bytes:
    """Return a frame that belongs to no sample."""
    return frame(CONTROL, to_json(values))


def to_json(value: Any) -> bytes:
    """Return JSON as bytes. It is ASCII, so half a surrogate pair in a response stays unchanged."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def config_to_json(config: RewardConfig) -> bytes:
    """Return the section `reward` in the form sent to the supervisor."""
    try:
        return to_json(asdict(config))
    except (TypeError, ValueError) as error:
        raise RewardError(f"an option is not plain data: {error}", where="reward.functions") from error


def config_from_json(body: bytes) -> RewardConfig:
    values = json.loads(body)
    functions = {label: RewardFunctionConfig(**function) for label, function in values.pop("functions").items()}
    return RewardConfig(functions=functions, **values)


class FrameReader:
    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield the ticket and body of every frame that `data` completes."""
        self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            ticket, length = _HEADER.unpack_from(self._buffer)
            if length > self._max_bytes:
                raise FrameError(f"a frame of {length} bytes; at most {self._max_bytes}")
            end = _HEADER.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            yield ticket, body
