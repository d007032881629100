"""Transfer of tensors between two processes on the same device, without network copies.

    sender (a trainer rank)                              receiver (a rollout worker)
    hello: protocol, version, two shared buffers   ->
                                                   <-    welcome
    bucket: slot, [name, dtype, shape, offset]...  ->    reads the tensors in place
                                                   <-    done: slot
    ...                                                  (the other slot is filled meanwhile)
    end                                            ->
                                                   <-    digests: {name: digest}, or at any time refused: reason

The Unix socket carries short JSON, never pickles. On a CPU the buffers are memfds, which are in no file system and
disappear with the processes that map them; on a GPU they are CUDA IPC handles. A connection lasts for one version, so
that a restarted process simply connects again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import mmap
import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrl.dtypes import dtype_name, torch_dtype
from mrl.errors import RolloutError

ALIGNMENT_BYTES = 64
"""Alignment of tensors in a buffer, so that a view of any dtype is aligned."""
NUM_SLOTS = 2
_PROTOCOL = 1
_MAX_FRAME_BYTES = 16 << 20
_LENGTH = struct.Struct(">I")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_MAX_PATH_BYTES = 107
_RETRY_S = 0.02
_HELLO_S = 5.0
"""A trainer sends hello as soon as it connects."""
_DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn")


def socket_path(sockets: Path, replica: str, worker: int) -> Path:
    """Return the socket on which one process of a replica receives weights."""
    return sockets / f"{replica}-{worker}.sock"


@dataclass(frozen=True)
class TensorView:
    """A contiguous tensor in a buffer, starting at byte `offset`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, buffer: Tensor) -> Tensor:
        return buffer[self.offset : self.offset + self.num_bytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class SharedBuffer:
    """One of the shared buffers, as bytes."""

    number: int
    buffer: Tensor


@dataclass(frozen=True)
class Bucket:
    """Tensors of one version, as views of the sender's buffer. They are valid until the next bucket is requested."""

    version: int
    tensors: dict[str, Tensor]


class IpcSender:
    """The trainer's side: call `begin`, then `slot` and `send` for each bucket, then `end`; in any case `close`."""

    def __init__(self, path: Path, slot_bytes: int, device: torch.device, deadline_s: float = 120.0) -> None:
        self._path, self._device, self._deadline_s = path, device, deadline_s
        self._slot_bytes = slot_bytes
        self.receiver = f"rollout worker {path.stem}"
        self._line: _Channel | None = None
        self._slots: list[SharedBuffer] = []
        self._free: list[SharedBuffer] = []

    def begin(self, version: int) -> None:
        """Connect to the receiver, which may not listen yet, and share the buffers."""
        self._line = line = _Channel(_connect(self._path, self._deadline_s), self.receiver)
        shared = [_share(self._slot_bytes, self._device) for _ in range(NUM_SLOTS)]
        self._slots = [SharedBuffer(number, buffer) for number, (buffer, _, _) in enumerate(shared)]
        self._free = list(self._slots)
        descriptors = [descriptor for _, _, descriptor in shared if descriptor is not None]
        hello = {"protocol": _PROTOCOL, "version": version, "slots": [handle for _, handle, _ in shared]}
        try:
            line.send("hello", hello, descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)  # the mappings stay
        line.receive("welcome", self._deadline_s)

    def slot(self) -> SharedBuffer:
        """Return a buffer that the receiver does not read; wait until one is free."""
        if not self._free:
            done, _ = self._connected().receive("done", self._deadline_s)
            self._free.append(self._slots[done["slot"]])
        return self._free.pop(0)

    def send(self, slot: SharedBuffer, tensors: Sequence[TensorView]) -> None:
        """Announce the content of a slot to the receiver. The receiver owns it until `slot` returns it again."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        rows = [[view.name, dtype_name(view.dtype), view.shape, view.offset] for view in tensors]
        self._connected().send("bucket", {"slot": slot.number, "tensors": rows})

    def end(self) -> dict[str, str]:
        """Signal that everything has been sent. Return the receiver's digests once it has loaded everything."""
        line = self._connected()
        line.send("end", {})
        while len(self._free) < NUM_SLOTS:
            done, _ = line.receive("done", self._deadline_s)
            self._free.append(self._slots[done["slot"]])
        reply, _ = line.receive("digests", self._deadline_s)
        return dict(reply["digests"])

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
        self._line, self._slots, self._free = None, [], []
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]

    def _connected(self) -> _Channel:
        assert self._line is not None, "the sender was used before `begin` or after `close`"
        return self._line


class IpcReceiver:
    """The rollout worker's side: listens while it lives, and receives one version per call of `buckets`."""

    def __init__(self, path: Path, deadline_s: float = 120.0) -> None:
        self._path, self._deadline_s = path, deadline_s
        path.unlink(missing_ok=True)  # left by a crashed worker
        self._listener = socket.socket(socket.AF_UNIX)
        with _short_address(path) as address:
            self._listener.bind(address)
        self._listener.listen(1)
        self._line: _Channel | None = None

    def buckets(self) -> Iterator[Bucket]:
        """Yield the sender's buckets until its end signal. After that it waits for `reply`."""
        self._hang_up()
        self._line, (hello, descriptors) = self._meet()
        line = self._line
        if hello["protocol"] != _PROTOCOL:
            self.reject(f"the trainer has protocol {hello['protocol']}, but the rollout worker has {_PROTOCOL}")
            raise RolloutError(f"the trainer has protocol {hello['protocol']}, not {_PROTOCOL}")
        slots = [_map(handle, descriptors) for handle in hello["slots"]]
        line.send("welcome", {})
        while True:
            frame, _ = line.receive("bucket", self._deadline_s, or_kind="end")
            if frame["kind"] == "end":
                return
            buffer = slots[frame["slot"]]
            views = [_placed(row, buffer) for row in frame["tensors"]]
            yield Bucket(hello["version"], {view.name: view.view(buffer) for view in views})
            if buffer.is_cuda:
                torch.cuda.synchronize(buffer.device)
            line.send("done", {"slot": frame["slot"]})

    def reply(self, digests: dict[str, str]) -> None:
        """Send the digests of the received tensors, and end the round."""
        assert self._line is not None, "not connected: call `reply` after `buckets`"
        self._line.send("digests", {"digests": digests})
        self._hang_up()

    def reject(self, reason: str) -> None:
        """Send the reason for rejecting this version, and end the round."""
        if self._line is not None:
            with contextlib.suppress(RolloutError):  # the reason may be the sender's death
                self._line.send("refused", {"reason": reason})
        self._hang_up()

    def close(self) -> None:
        self._hang_up()
        self._listener.close()
        self._path.unlink(missing_ok=True)

    def _meet(self) -> tuple[_Channel, tuple[dict[str, Any], list[int]]]:
        """Return the connection and hello of a trainer. Disconnect processes that send anything else, or nothing."""
        deadline, note = time.monotonic() + self._deadline_s, ""
        while (remaining := deadline - time.monotonic()) > 0:
            self._listener.settimeout(remaining)
            connection = None
            try:
                connection, _ = self._listener.accept()
                line = _Channel(connection, "the trainer")
                return line, line.receive("hello", min(_HELLO_S, remaining), NUM_SLOTS)
            except TimeoutError:
                break
            except RolloutError as error:
                note = f"; another process connected: {error.what}"
                if connection is not None:
                    connection.close()
        raise RolloutError(f"no trainer sent weights within {self._deadline_s:g} s{note}", where=str(self._path))

    def _hang_up(self) -> None:
        if self._line is not None:
            self._line.close()
        self._line = None


class _Channel:
    """Length-prefixed JSON frames over a socket, with timeouts, from this user's processes only."""

    def __init__(self, connection: socket.socket, other: str) -> None:
        self._connection, self._other = connection, other
        packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user, _ = _CREDENTIALS.unpack(packed)
        if user != os.geteuid():
            connection.close()
            raise RolloutError(f"{other} runs as user {user}, not as user {os.geteuid()}")

    def send(self, kind: str, frame: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        body = json.dumps({"kind": kind, **frame}).encode()
        assert len(body) <= _MAX_FRAME_BYTES, f"the frame has {len(body)} bytes: put fewer tensors into a bucket"
        try:
            socket.send_fds(self._connection, [_LENGTH.pack(len(body))], descriptors)
            self._connection.sendall(body)
        except OSError as error:
            self._explain_refusal()
            raise RolloutError(f"{self._other} has disconnected: {error}") from error

    def receive(
        self, kind: str, deadline_s: float, num_descriptors: int = 0, or_kind: str = ""
    ) -> tuple[dict[str, Any], list[int]]:
        deadline = time.monotonic() + deadline_s
        try:
            self._connection.settimeout(deadline_s)
            head, descriptors, _, _ = socket.recv_fds(
                self._connection, _LENGTH.size, num_descriptors, socket.MSG_CMSG_CLOEXEC
            )
            (length,) = _LENGTH.unpack(head + self._read(_LENGTH.size - len(head), deadline))
            if length > _MAX_FRAME_BYTES:
                raise RolloutError(f"{self._other} announced a frame of {length} bytes, more than {_MAX_FRAME_BYTES}")
            frame: dict[str, Any] = json.loads(self._read(length, deadline))
            if not isinstance(frame, dict) or "kind" not in frame:
                raise ValueError("the frame has no kind")
        except TimeoutError:
            raise RolloutError(f"{self._other} sent no `{kind}` within {deadline_s:g} s") from None
        except (OSError, ValueError) as error:
            raise RolloutError(f"{self._other} disconnected before it sent `{kind}`: {error}") from error
        if frame["kind"] == "refused":
            raise RolloutError(f"{self._other} refused the weights: {frame['reason']}")
        if frame["kind"] not in (kind, or_kind):
            raise RolloutError(f"{self._other} sent `{frame['kind']}` instead of `{kind}`")
        return frame, descriptors

    def close(self) -> None:
        self._connection.close()

    def _read(self, num_bytes: int, deadline: float) -> bytes:
        parts = []
        while num_bytes:
            self._connection.settimeout(max(deadline - time.monotonic(), 1e-3))
            parts.append(self._connection.recv(min(num_bytes, 1 << 20)))
            if not parts[-1]:
                raise ConnectionResetError("it closed the connection")
            num_bytes -= len(parts[-1])
        return b"".join(parts)

    def _explain_refusal(self) -> None:
        """Raise an error with the reason that the other side sent before it left, if any."""
        with contextlib.suppress(OSError, ValueError, struct.error):
            self._connection.settimeout(0.1)
            (length,) = _LENGTH.unpack(self._connection.recv(_LENGTH.size))
            frame = json.loads(self._read(min(length, _MAX_FRAME_BYTES), time.monotonic() + 1))
            if frame["kind"] == "refused":
                raise RolloutError(f"{self._other} refused the weights: {frame['reason']}")


def _connect(path: Path, deadline_s: float) -> socket.socket:
    deadline = time.monotonic() + deadline_s
    while True:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(deadline_s)
        try:
            with _short_address(path) as address:
                connection.connect(address)
            return connection
        except OSError as error:
            connection.close()
            if time.monotonic() > deadline:
                problem = f"no rollout worker listens after {deadline_s:g} s: {error}"
                raise RolloutError(problem, where=str(path)) from error
        time.sleep(_RETRY_S)


@contextlib.contextmanager
def _short_address(path: Path) -> Iterator[str]:
    """Yield an address for a socket whose path is too long for the kernel, through its open directory."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        address = f"/proc/self/fd/{directory}/{path.name}"
        if len(os.fsencode(address)) > _MAX_PATH_BYTES:
            raise RolloutError(f"the socket's name is too long: {len(os.fsencode(path.name))} bytes", where=str(path))
        yield address
    finally:
        os.close(directory)


def _share(num_bytes: int, device: torch.device) -> tuple[Tensor, dict[str, Any], int | None]:
    """Return a new buffer, the handle for another process, and on a CPU the file descriptor to send with it."""
    if device.type == "cuda":
        buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        parts = buffer.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
        handle = [part.hex() if isinstance(part, bytes) else part for part in parts[1:]]
        return buffer, {"cuda": handle, "uuid": _uuid(device)}, None
    descriptor = os.memfd_create("mrl-handover", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, num_bytes)
    # A buffer that cannot shrink cannot crash its readers.
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return _mapped(descriptor, num_bytes), {"bytes": num_bytes}, descriptor


def _map(handle: dict[str, Any], descriptors: list[int]) -> Tensor:
    if "cuda" in handle:
        device = torch.device("cuda", torch.cuda.current_device())
        if handle["uuid"] != _uuid(device):
            raise RolloutError(
                f"the trainer's buffer is on device {handle['uuid']}, but the worker is on {_uuid(device)}"
            )
        parts = [bytes.fromhex(part) if isinstance(part, str) else part for part in handle["cuda"]]
        storage = torch.UntypedStorage._new_shared_cuda(device.index, *parts)
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
    descriptor = descriptors.pop(0)
    try:
        return _mapped(descriptor, handle["bytes"])
    finally:
        os.close(descriptor)


def _mapped(descriptor: int, num_bytes: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _placed(row: list[Any], buffer: Tensor) -> TensorView:
    """Return the tensor that a row of a bucket frame describes. Raise an error if it is not inside the buffer."""
    name, dtype, shape, offset = row
    if dtype not in _DTYPES:
        raise RolloutError(f"{name} has dtype {dtype}; supported: {', '.join(_DTYPES)}")
    view = TensorView(name, torch_dtype(dtype), tuple(shape), offset)
    if offset < 0 or offset % ALIGNMENT_BYTES or min(shape, default=0) < 0 or offset + view.num_bytes > buffer.numel():
        raise RolloutError(f"{name} {shape} at byte {offset} is not inside the buffer of {buffer.numel()} bytes")
    return view
