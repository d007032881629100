"""The process of a program, and all processes that it starts, which end with it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from mrl.children import children, children_of, reap

_MAX_SAID_BYTES = 2000
_POLL_S = 0.002
_LEFT_S = 1.0
"""Seconds for killed processes to disappear, and for their last output to arrive."""


class ProgramProcess:
    """A running program in its own session.

    Processes that it leaves behind are identified by a secret word in their environment, which no other program has.
    They have become children of this process, which adopts orphans.
    """

    def __init__(self, process: asyncio.subprocess.Process, word: str) -> None:
        self._process, self._word = process, word.encode()
        self.ended = asyncio.ensure_future(self._end())
        """Done when the program has ended, with its status and the end of its output."""

    @classmethod
    async def start(cls, command: Sequence[str], variables: Mapping[str, str], word: str) -> ProgramProcess:
        """Start a command with additional variables, one of which contains the word."""
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **variables},
            start_new_session=True,
        )
        return cls(process, word)

    async def close(self) -> None:
        """End the program and all processes that it has started."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        await self.ended

    async def _end(self) -> tuple[int, str]:
        output = bytearray()
        reading = asyncio.ensure_future(self._read(output))
        status = await self._exit()
        await self._end_orphans()
        await asyncio.wait({reading}, timeout=_LEFT_S)
        reading.cancel()
        return status, output.decode(errors="replace").strip()

    async def _exit(self) -> int:
        """Wait only for the program. asyncio's `wait` also waits for processes that hold its stderr open."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ProcessLookupError):  # asyncio has already waited for it
            descriptor, gone = os.pidfd_open(self._process.pid), asyncio.Event()
            loop.add_reader(descriptor, gone.set)
            try:
                await gone.wait()
            finally:
                loop.remove_reader(descriptor)
                os.close(descriptor)
        while self._process.returncode is None:  # asyncio's own watcher has not been notified yet
            await asyncio.sleep(_POLL_S)
        return self._process.returncode

    async def _read(self, output: bytearray) -> None:
        assert self._process.stderr is not None, "it has a pipe"
        while more := await self._process.stderr.read(1 << 16):
            output += more
            del output[:-_MAX_SAID_BYTES]

    async def _end_orphans(self) -> None:
        """Kill the remaining processes of the program and their descendants. Repeat, because a killed process may just
        have forked."""
        killed: set[int] = set()
        until = time.monotonic() + _LEFT_S
        while (level := {pid for pid in children() if self._is_mine(pid)}) or (killed and time.monotonic() < until):
            while level:
                deeper = {child for pid in level for child in children_of(pid)}
                for pid in level:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                killed |= level
                level = deeper
            await asyncio.sleep(_POLL_S)
            # A descendant becomes a child of this process when its parent is gone, and is waited for then.
            killed = {pid for pid in killed if not reap(pid) or Path(f"/proc/{pid}").exists()}

    def _is_mine(self, pid: int) -> bool:
        """Return whether the program started this process. A killed process no longer has an environment."""
        with contextlib.suppress(OSError):  # it has been waited for, or belongs to another user
            return os.getsid(pid) == self._process.pid or self._word in Path(f"/proc/{pid}/environ").read_bytes()
        return False
