"""Many samples in one worker at once: coroutines on one event loop, each with its own limit.

A coroutine that waits forever affects only its own sample. A coroutine that computes forever blocks the others, so the
supervisor kills the worker. Shared memory holds the ticket of the running sample, so the supervisor knows which sample
it was.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

from mrl.children import children, end_group, has_children, reap
from mrl.config.agent import AgentConfig
from mrl.config.reward import RewardConfig
from mrl.rewards.messages import GOES_ON, MAX_SAMPLE_BYTES, FrameReader, control, frame, to_json
from mrl.rewards.outcome import failure_reply

_TICKET: ContextVar[int] = ContextVar("ticket", default=0)
_STACK_BYTES = 1 << 20
"""Stack of a thread of `asyncio.to_thread`. The default takes eight times as much of the worker's address space."""
_NUMBER = struct.Struct("Q")
Answer = Callable[[int, bytes], Coroutine[Any, Any, dict[str, Any]]]
"""Computes the answer for a ticket and its request."""


class Running:
    """Ticket of the sample whose code the worker is running, readable by its parent; 0 if none."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _NUMBER.size)  # shared with processes forked from this one

    @property
    def ticket(self) -> int:
        return int(_NUMBER.unpack_from(self._memory)[0])

    @ticket.setter
    def ticket(self, ticket: int) -> None:
        _NUMBER.pack_into(self._memory, 0, ticket)


class _Traced(Coroutine[Any, Any, Any]):
    """A coroutine that records its ticket while it runs, until it waits for something."""

    def __init__(self, inner: Coroutine[Any, Any, Any], running: Running, ticket: int) -> None:
        self._inner, self._running, self._ticket = inner, running, ticket

    def send(self, value: Any) -> Any:
        return self._step(self._inner.send, value)

    def throw(self, *error: Any) -> Any:
        return self._step(self._inner.throw, *error)

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Any:
        return self._inner.__await__()

    def _step(self, step: Callable[..., Any], *arguments: Any) -> Any:
        self._running.ticket = self._ticket
        try:
            return step(*arguments)
        finally:
            self._running.ticket = 0


class SideBySide:
    """Answers each frame when its coroutine is done, until the channel closes or a fresh process is due."""

    def __init__(
        self, channel: socket.socket, limits: RewardConfig | AgentConfig, running: Running, answer: Answer
    ) -> None:
        self._channel, self._running, self._answer = channel, running, answer
        self._limits = limits
        self._max_samples = limits.samples_per_worker
        self._reader = FrameReader(MAX_SAMPLE_BYTES)
        self._jobs: set[asyncio.Task[None]] = set()
        self._open: set[int] = set()  # tickets of samples that continue
        self._num_granted = self._num_answered = 0
        self._home, self._own = os.getcwd(), os.getpid()
        self._is_leaving = False

    def serve(self) -> None:
        threading.stack_size(_STACK_BYTES)
        asyncio.run(self._run())

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        self._end: asyncio.Future[None] = loop.create_future()
        loop.set_task_factory(self._make_task)
        # the default for `asyncio.to_thread` is small
        loop.set_default_executor(ThreadPoolExecutor(self._limits.concurrency))
        loop.add_reader(self._channel, self._read)
        for _ in range(min(self._limits.concurrency, self._max_samples)):
            self._grant()
        await self._end

    def _make_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        return asyncio.Task(_Traced(coroutine, self._running, _TICKET.get()), loop=loop, **options)

    def _grant(self) -> None:
        """Announce that one more sample may be sent."""
        self._num_granted += 1
        self._channel.sendall(control(ready=True))

    def _read(self) -> None:
        if self._end.done():
            return
        try:
            data = self._channel.recv(1 << 16)
        except (MemoryError, OSError) as error:  # the loop would call this again and again
            self._end.set_exception(error)
            return
        if not data:
            self._end.set_result(None)
        for ticket, body in self._reader.feed(data):
            _TICKET.set(ticket)
            job = asyncio.get_running_loop().create_task(self._reply(ticket, body))
            self._jobs.add(job)
            job.add_done_callback(self._jobs.discard)
        _TICKET.set(0)

    async def _reply(self, ticket: int, body: bytes) -> None:
        begin, limit_s = time.monotonic(), self._limits.limit_s
        job = asyncio.create_task(self._answer(ticket, body))
        done, _ = await asyncio.wait({job}, timeout=limit_s)
        if os.getpid() != self._own:
            os._exit(0)  # a fork inside the reward function that returned from it
        reply = job.result() if done else failure_reply("timeout", too_late(limit_s), time.monotonic() - begin)
        job.cancel()
        self._channel.sendall(frame(ticket, answer := to_json(reply)))
        if answer.startswith(GOES_ON):
            self._open.add(ticket)
            return
        self._open.discard(ticket)
        self._num_answered += 1
        self._is_leaving |= self._num_granted >= self._max_samples or reply.get("failure") == "memory"
        if len(self._jobs) == 1 and not self._open:
            clean_up(self._home)  # otherwise processes that other samples started may still be in use
        if not self._is_leaving:
            self._grant()
        elif self._num_answered == self._num_granted and not self._end.done():
            self._end.set_result(None)


def too_late(limit_s: float) -> str:
    return f"no answer within {limit_s:g} s"


def clean_up(home: str) -> None:
    """End processes that a reward function left running, and reset state that would affect the next sample."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    os.chdir(home)
    while has_children():
        for child in children():
            end_group(child)
            reap(child)
