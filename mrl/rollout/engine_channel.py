"""Messages between an engine and its process with another interpreter: JSON frames over a private socket."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

from mrl.errors import RolloutError

_LENGTH = struct.Struct(">Q")
_PART_BYTES = 1 << 20


class Channel:
    """One end. Both sides end together: a side that is gone is an error at the other side's next message."""

    def __init__(self, connection: socket.socket, other: str) -> None:
        self._connection, self._other = connection, other

    def send(self, frame: dict[str, Any]) -> None:
        body = json.dumps(frame).encode()
        try:
            self._connection.sendall(_LENGTH.pack(len(body)) + body)
        except OSError as error:
            raise RolloutError(f"{self._other} has ended: {error}") from error

    def receive(self) -> dict[str, Any]:
        """Wait for a message, without a limit: the driver limits the calls of the whole process."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        frame: dict[str, Any] = json.loads(self._read(length))
        return frame

    def close(self) -> None:
        self._connection.close()

    def _read(self, num_bytes: int) -> bytes:
        parts = []
        while num_bytes:
            try:
                parts.append(self._connection.recv(min(num_bytes, _PART_BYTES)))
            except OSError as error:
                raise RolloutError(f"{self._other} has ended: {error}") from error
            if not parts[-1]:
                raise RolloutError(f"{self._other} has ended")
            num_bytes -= len(parts[-1])
        return b"".join(parts)
