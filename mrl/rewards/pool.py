"""The run's side of the supervisor: start it, send samples, read answers, and end it."""

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
from mrl.spans import SPANS

_INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH")
_SILENCE_S = 30.0  # the supervisor sends a sign of life every second
_END_S = 10.0


class WorkerPool:
    """A supervisor and its workers. One thread at a time may send, and one may receive."""

    def __init__(
        self,
        section: str,
        supervisor: str,
        section_json: bytes,
        environment: Mapping[str, str],
        max_reply_bytes: int = MAX_REPLY_BYTES,
    ) -> None:
        """Start the module `supervisor`, and send it the section of the configuration for its workers."""
        if sys.platform != "linux":
            raise SetupError(f"{section} workers need Linux: other systems cannot end all processes of a function")
        self._section = section
        self._reader = FrameReader(max_reply_bytes)
        self._is_ready = self._is_traced = False
        self._is_closed = False
        self._supervisor = subprocess.Popen(
            [sys.executable, "-P", "-m", supervisor],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=worker_environment(environment),
            start_new_session=True,  # the run handles Ctrl-C
        )
        assert self._supervisor.stdin is not None, "stdin is a pipe"
        assert self._supervisor.stdout is not None, "stdout is a pipe"
        self._pipes = self._supervisor.stdin, self._supervisor.stdout
        self._to_supervisor, self._from_supervisor = (pipe.fileno() for pipe in self._pipes)
        os.set_blocking(self._to_supervisor, False)
        os.set_blocking(self._from_supervisor, False)
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            self._write(frame(CONTROL, section_json))
            while not self._is_ready:  # the supervisor knows the limits, and reports if no worker can start
                self._wait(self._from_supervisor, select.POLLIN)
                for answer in self._reader.feed(self._read()):
                    self._is_control(*answer)
            stack.pop_all()

    def submit(self, ticket: int, body: bytes) -> None:
        """Queue a sample. Its ticket, a number from 1, is returned with the answer."""
        self._check_open()
        if SPANS.is_on != self._is_traced:
            self._is_traced = SPANS.is_on
            self._write(control(trace=self._is_traced))
        self._write(frame(ticket, body))

    def receive(self, *, waits: bool = True) -> list[tuple[int, bytes]]:
        """Return the received answers. With `waits`, wait for at least one."""
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
        with contextlib.suppress(RewardError):  # the supervisor has already ended
            self._write(control(close=True))
        with contextlib.suppress(BrokenPipeError):
            self._pipes[0].close()
        try:
            self._supervisor.wait(_END_S)
        except subprocess.TimeoutExpired:
            os.kill(self._supervisor.pid, signal.SIGKILL)  # the kernel notifies the workers
            self._supervisor.wait()
        self._pipes[1].close()  # last, so that a thread that still receives has seen the end

    def _is_control(self, ticket: int, body: bytes) -> bool:
        """Handle a frame that belongs to no sample. Return whether it was one."""
        if ticket != CONTROL:
            return False
        message = json.loads(body)
        if "problems" in message:
            raise RewardError("\n".join(message["problems"]))
        self._is_ready = self._is_ready or "ready" in message
        for pid, begin_ns, end_ns in message.get("worked", ()):
            SPANS.add(f"{self._section} worker {pid}", "sample" if end_ns else "", begin_ns, end_ns)
        return True

    def _read(self) -> bytes:
        """Return the contents of the pipe, or nothing if it is empty."""
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
                f"{self._name} has been silent for {_SILENCE_S:g} s",
                where=self._section,
                fix="check whether it was stopped, or the machine is out of memory",
            )

    def _check_open(self) -> None:
        if self._is_closed:
            raise RewardError(f"the {self._section} workers have already ended", where=self._section)

    def _supervisor_gone(self) -> RewardError:
        try:
            status = f"exited with status {self._supervisor.wait(1)}"
        except subprocess.TimeoutExpired:
            status = "has closed its connection"
        fix = "see its last output on the run's standard error"
        return RewardError(f"{self._name} {status}", where=self._section, fix=fix)

    @property
    def _name(self) -> str:
        return f"the supervisor of the {self._section} workers (pid {self._supervisor.pid})"


def worker_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of reward functions: a short list of variables, the modules of the run, and `extra`."""
    inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    installed = tuple(sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib"))  # found without PYTHONPATH
    modules = os.pathsep.join(os.path.abspath(path) for path in sys.path if not path.startswith(installed))
    # Many workers share a machine: libraries that would use all of its cores get one, and threads share arenas.
    return inherited | {"PYTHONPATH": modules, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"} | dict(extra)
