"""The supervisor's side of one worker: its channel, its sample and its clock."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator

from mrl.rewards.frames import MAX_REPLY_BYTES, FrameReader, frame
from mrl.rewards.processes import end_group
from mrl.rewards.settings import PoolSettings
from mrl.rewards.worker import run_worker

_TURN_S = 1.0  # for a worker to be ready again after a sample


class WorkerHandle:
    """A worker that was started; it is thrown away with its process."""

    def __init__(self, settings: PoolSettings) -> None:
        self.channel, theirs = socket.socketpair()
        self.descriptor = self.channel.fileno()
        supervisor = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            run_worker(theirs, settings, supervisor)
        theirs.close()
        self.channel.setblocking(False)
        self._settings = settings
        self.started = False
        """Whether it ever was ready."""
        self.ticket: int | None = None
        self.since = time.monotonic()
        """When it got its sample, or, without one, when it was last waited for."""
        self.is_ready = False
        self._reader = FrameReader(MAX_REPLY_BYTES)
        self._outgoing = memoryview(b"")

    @property
    def is_writing(self) -> bool:
        """Whether the channel was too full for the whole sample."""
        return bool(self._outgoing)

    @property
    def limit_s(self) -> float:
        """How long its clock may run."""
        if self.ticket is not None:
            return self._settings.limit_s
        if self.is_ready:
            return float("inf")
        return _TURN_S if self.started else self._settings.start_limit_s

    @property
    def seconds(self) -> float:
        """How long its clock has run."""
        return time.monotonic() - self.since

    def assign(self, ticket: int, body: bytes) -> None:
        """Give it a sample, and start the clock."""
        self.ticket, self.since, self.is_ready = ticket, time.monotonic(), False
        self._outgoing = memoryview(frame(ticket, body))
        self.write()

    def write(self) -> None:
        """Send as much as the channel takes."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):  # reading tells of the end
            self._outgoing = self._outgoing[self.channel.send(self._outgoing) :]

    def read(self) -> Iterator[tuple[int, bytes]] | None:
        """The frames that have come; None where the worker has closed its end."""
        try:
            data = self.channel.recv(1 << 16)
        except BlockingIOError:
            return iter(())
        except ConnectionResetError:
            return None
        return self._reader.feed(data) if data else None

    def end(self) -> None:
        """Kill the worker with its group; what left the group comes to the supervisor as an orphan."""
        self.channel.close()
        end_group(self.pid)
