"""The run's side of the supervisor: starts it, sends it samples, reads its answers, and ends it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Mapping

from mrl.errors import RewardError, SetupError
from mrl.rewards.messages import CONTROL, MAX_REPLY_BYTES, FrameReader, control, frame

_INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH")
_SILENCE_S = 30.0  # the supervisor says something every second
_END_S = 10.0


class WorkerPool:
    """A supervisor and its workers. One thread at a time sends, and one receives."""

    def __init__(
        self,
        section: str,
        supervisor: str,
        told: bytes,
        environment: Mapping[str, str],
        max_reply_bytes: int = MAX_REPLY_BYTES,
    ) -> None:
        """Start the module `supervisor`, and tell it the section of the configuration that the workers are for."""
        if sys.platform != "linux":
            raise SetupError(f"{section} workers need Linux: elsewhere nothing ends what a function leaves behind")
        self._section = section
        self._reader = FrameReader(max_reply_bytes)
        self._is_ready = False
        self._is_closed = False
        self._supervisor = subprocess.Popen(
            [sys.executable, "-P", "-m", supervisor],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=worker_environment(environment),
            start_new_session=True,  # Ctrl-C is the run's to handle
        )
        assert self._supervisor.stdin is not None, "it was asked for as a pipe"
        assert self._supervisor.stdout is not None, "it was asked for as a pipe"
        self._pipes = self._supervisor.stdin, self._supervisor.stdout
        self._to_supervisor, self._from_supervisor = (pipe.fileno() for pipe in self._pipes)
        os.set_blocking(self._to_supervisor, False)
        os.set_blocking(self._from_supervisor, False)
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            self._write(frame(CONTROL, told))
            while not self._is_ready:  # the supervisor knows the limits, and says where no worker can be had
                self._wait(self._from_supervisor, select.POLLIN)
                for answer in self._reader.feed(self._read()):
                    self._is_control(*answer)
            stack.pop_all()

    def submit(self, ticket: int, body: bytes) -> None:
        """Queue a sample; its ticket, a number from 1, comes back with the answer."""
        self._check_open()
        self._write(frame(ticket, body))

    def receive(self, *, waits: bool = True) -> list[tuple[int, bytes]]:
        """Return the answers that have come, at least one if it is waited for."""
        self._check_open()
        answers: list[tuple[int, bytes]] = []
        while True:
            while data := self._read():
                answers += [answer for answer in self._reader.feed(data) if not self._is_control(*answer)]
            if answers or not waits:
                return answers
            self._wait(self._from_supervisor, select.POLLIN)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(RewardError):  # it is gone already
            self._write(control(close=True))
        with contextlib.suppress(BrokenPipeError):
            self._pipes[0].close()
        try:
            self._supervisor.wait(_END_S)
        except subprocess.TimeoutExpired:
            os.kill(self._supervisor.pid, signal.SIGKILL)  # the workers are told by the kernel
            self._supervisor.wait()
        self._pipes[1].close()  # only now: a thread that still receives has seen its end

    def _is_control(self, ticket: int, body: bytes) -> bool:
        """Handle a frame that belongs to no sample, and return whether it was one."""
        if ticket != CONTROL:
            return False
        said = json.loads(body)
        if "problems" in said:
            raise RewardError("\n".join(said["problems"]))
        self._is_ready = self._is_ready or "ready" in said
        return True

    def _read(self) -> bytes:
        """Return what the pipe holds; nothing where it is empty."""
        try:
            data = os.read(self._from_supervisor, 1 << 20)
        except BlockingIOError:
            return b""
        if not data:
            raise self._supervisor_gone()
        return data

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(self._to_supervisor, left) :]
            except BlockingIOError:
                self._wait(self._to_supervisor, select.POLLOUT)
            except BrokenPipeError:
                raise self._supervisor_gone() from None

    def _wait(self, pipe: int, event: int) -> None:
        poll = select.poll()
        poll.register(pipe, event)
        if not poll.poll(_SILENCE_S * 1000):
            raise RewardError(
                f"{self._name} is silent for {_SILENCE_S:g} s",
                where=self._section,
                fix="was it stopped, or is the machine out of memory?",
            )

    def _check_open(self) -> None:
        if self._is_closed:
            raise RewardError(f"the {self._section} workers were ended already", where=self._section)

    def _supervisor_gone(self) -> RewardError:
        try:
            status = f"left with status {self._supervisor.wait(1)}"
        except subprocess.TimeoutExpired:
            status = "has closed its end"
        fix = "its last words are on the run's standard error"
        return RewardError(f"{self._name} {status}", where=self._section, fix=fix)

    @property
    def _name(self) -> str:
        return f"the supervisor of the {self._section} workers (pid {self._supervisor.pid})"


def worker_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of reward functions: a short list, the modules of the run, and what they were given."""
    inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    installed = tuple(sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib"))  # found without being told
    modules = os.pathsep.join(os.path.abspath(path) for path in sys.path if not path.startswith(installed))
    # Many workers share a machine: each library that likes to use all of its cores gets one, and threads share arenas.
    return inherited | {"PYTHONPATH": modules, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"} | dict(extra)
