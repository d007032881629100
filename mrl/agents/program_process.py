"""The process of a program and all processes that it starts, which end with the program."""

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
"""For those who are killed to be gone, and for the last words to arrive, to which nobody can add then."""


class ProgramProcess:
    """A program under way in a session of its own.

    The processes that it leaves behind are found by a word of their environment, which no other program has: they have
    become children of this process, as those of all programs do, for it adopts its orphans.
    """

    def __init__(self, process: asyncio.subprocess.Process, word: str) -> None:
        self._process, self._word = process, word.encode()
        self.ended = asyncio.ensure_future(self._end())
        """Done when the program has ended, with its status and the end of what it said."""

    @classmethod
    async def start(cls, command: Sequence[str], variables: Mapping[str, str], word: str) -> ProgramProcess:
        """Start a command with these variables as well, one of which holds the word."""
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
        """End the program and all that it has started."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        await self.ended

    async def _end(self) -> tuple[int, str]:
        said = bytearray()
        reading = asyncio.ensure_future(self._read(said))
        status = await self._exit()
        await self._end_orphans()
        await asyncio.wait({reading}, timeout=_LEFT_S)
        reading.cancel()
        return status, said.decode(errors="replace").strip()

    async def _exit(self) -> int:
        """Wait for the program alone: `wait` of asyncio also waits for whoever holds its stderr open."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ProcessLookupError):  # asyncio has waited for it already
            descriptor, gone = os.pidfd_open(self._process.pid), asyncio.Event()
            loop.add_reader(descriptor, gone.set)
            try:
                await gone.wait()
            finally:
                loop.remove_reader(descriptor)
                os.close(descriptor)
        while self._process.returncode is None:  # asyncio's own watcher has yet to hear of it
            await asyncio.sleep(_POLL_S)
        return self._process.returncode

    async def _read(self, said: bytearray) -> None:
        assert self._process.stderr is not None, "it has a pipe"
        while more := await self._process.stderr.read(1 << 16):
            said += more
            del said[:-_MAX_SAID_BYTES]

    async def _end_orphans(self) -> None:
        """Kill what the program has left, and all below it; again, for who is killed may just have forked."""
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
            # Who was below another becomes a child of this process when that one is gone, and is waited for then.
            killed = {pid for pid in killed if not reap(pid) or Path(f"/proc/{pid}").exists()}

    def _is_mine(self, pid: int) -> bool:
        """Return whether the program has started it: one that is killed already has no environment any more."""
        with contextlib.suppress(OSError):  # it has been waited for, or is another user's
            return os.getsid(pid) == self._process.pid or self._word in Path(f"/proc/{pid}/environ").read_bytes()
        return False
