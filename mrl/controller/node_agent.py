"""One small actor per node that inspects processes when the workers themselves cannot answer."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mrl.children import children_of
from mrl.controller.diagnosis import NodeMemory, kernel_view, native_frames
from mrl.controller.network import Endpoint, Network, failures, listen_everywhere, network
from mrl.controller.node_calls import NodeCalls
from mrl.controller.worker_log import STACK_SIGNAL, stack_path, tail
from mrl.spans import clock_of_host

_STACK_WAIT_S = 1.0
_END_WAIT_S = 0.5


@dataclass(frozen=True)
class ProcessId:
    """A process, identified by pid and start time, because pids are reused."""

    pid: int
    start_ticks: int


@dataclass(frozen=True)
class ProcessView:
    """State of a process on its node: the kernel's state letter, or None if it has ended."""

    state: str | None

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended (zombies count as ended)."""
        return self.state is None or self.state in "ZX"

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped the process."""
        return self.state is not None and self.state in "Tt"


def read_process(pid: int) -> tuple[str, int] | None:
    """Return state letter and start time of a process from the kernel; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the command name may contain anything, also brackets
    return fields[0], int(fields[19])


def view(process: ProcessId) -> ProcessView:
    status = read_process(process.pid)
    is_same = status is not None and status[1] == process.start_ticks
    return ProcessView(status[0] if status is not None and is_same else None)


def own_process() -> ProcessId:
    status = read_process(os.getpid())
    assert status is not None, "a running process can see itself"
    return ProcessId(os.getpid(), status[1])


def _job_of(pid: int | str) -> bytes:
    """Return the job for which Ray started a worker; empty if there is no job or the worker has ended."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return b""
    return next((variable for variable in variables if variable.startswith(b"RAY_JOB_ID=")), b"")


def _stack(process: ProcessId, log: str) -> str:
    path = stack_path(Path(log))
    if view(process).is_gone:
        return "its process has ended"
    if not path.is_file():
        return "none: it has not opened its log yet"  # the signal would end it
    before = path.stat().st_size
    os.kill(process.pid, STACK_SIGNAL)
    os.kill(process.pid, signal.SIGCONT)
    deadline = time.monotonic() + _STACK_WAIT_S
    size = before
    while time.monotonic() < deadline:
        time.sleep(0.05)
        size_now = path.stat().st_size
        if size_now > before and size_now == size:
            break
        size = size_now
    with path.open("rb") as file:
        file.seek(before)
        return file.read().decode("utf-8", "replace").strip() or "no answer, not even to a signal"


class NodeLost(Exception):
    """Raised if the agent's node is no longer part of the cluster."""


class HostClock:
    def clock(self) -> tuple[str, int]:
        """Return the name of the node's clock, and its nanoseconds."""
        return clock_of_host()


class NodeAgent(HostClock, NodeCalls):
    """Inspects and ends processes, and passes on calls to many ranks. It does not know about roles or batches."""

    def __init__(self) -> None:
        super().__init__()
        self._raylet = os.getppid()
        self._listeners: list[socket.socket] = []
        self._heard = 0.0

    def hear(self, limit_s: float) -> None:
        """Record that the run's driver is alive.

        After `limit_s` without a call, end the run's processes on this node.
        """
        if not self._heard:
            threading.Thread(target=self._end_unheard, args=(limit_s,), name="fence", daemon=True).start()
        self._heard = time.monotonic()

    def _end_unheard(self, limit_s: float) -> None:
        time.sleep(limit_s)
        while (left_s := self._heard + limit_s - time.monotonic()) > 0:
            time.sleep(left_s)
        job = _job_of("self")
        for pid in children_of(self._raylet) - {os.getpid()}:
            if _job_of(pid) == job:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)  # an unreachable process would keep writing into the run directory
        os.kill(os.getpid(), signal.SIGKILL)

    def describe(self) -> tuple[str, str]:
        """Return the node's name and the authentication mode of its Ray."""
        return socket.gethostname(), os.environ.get("RAY_AUTH_MODE", "disabled")

    def sees(self, path: str) -> bool:
        """Return whether a file is visible on this node. The run directory must be visible on every node."""
        return Path(path).is_file()

    def network(self, address: str) -> Network:
        """Return how this node uses the network of one of its addresses."""
        return network(address)

    def listen(self, address: str) -> list[Endpoint]:
        """Open sockets for connection tests from other nodes, until `stop_listening`."""
        sockets = listen_everywhere(address)
        self._listeners = [listener for listener, _ in sockets]
        return [endpoint for _, endpoint in sockets]

    def failures(self, endpoints: list[Endpoint], limit_s: float) -> list[str]:
        """Return the reason why each endpoint is unreachable from this node; empty if it is reachable."""
        return failures(endpoints, limit_s)

    def stop_listening(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._listeners = []

    def poll_states(self, processes: list[ProcessId]) -> list[ProcessView]:
        """Return the state of each process.

        If the node's raylet has died, all count as ended: Ray ends them one by one.
        """
        if os.getppid() != self._raylet:
            return [ProcessView(None)] * len(processes)
        return [view(process) for process in processes]

    def stacks(self, processes: list[tuple[ProcessId, str]]) -> list[str]:
        """Return the Python stacks of processes, each given with its log. Stopped processes are woken up to write them.

        This is only used after a failed call, before the processes are ended.
        """
        with ThreadPoolExecutor(len(processes)) as threads:
            return list(threads.map(_stack, *zip(*processes, strict=True)))

    def threads(self, process: ProcessId) -> tuple[str, str]:
        """Return the native frames of a process and the kernel's view of its threads; empty if it has ended."""
        if view(process).is_gone:
            return "", ""
        return native_frames(process.pid), kernel_view(process.pid)

    def tail(self, log: str, num_lines: int) -> str:
        return tail(Path(log), num_lines)

    def first_words(self, pid: int, num_lines: int) -> str:
        """Return the last lines that a worker wrote before it opened its own log: Ray keeps them."""
        own_log = Path(os.readlink("/proc/self/fd/2"))
        return "\n".join(tail(log, num_lines) for log in sorted(own_log.parent.glob(f"worker-*-{pid}.err")))

    def kill_all(self, processes: list[ProcessId]) -> None:
        """Wait for the end of processes that Ray is killing, then send SIGKILL to the remaining ones.

        Ray asks a process to end itself. Stopped processes and processes in a hanging collective do not react.
        """
        deadline = time.monotonic() + _END_WAIT_S
        while (running := [process for process in processes if not view(process).is_gone]) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.02)
        for process in running:
            os.kill(process.pid, signal.SIGKILL)

    def memory(self) -> NodeMemory:
        """Return the node's memory counters."""
        if os.getppid() != self._raylet:
            raise NodeLost("the raylet of this node has died")
        counters = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        shared = os.statvfs("/dev/shm")
        sizes = (shared.f_blocks * shared.f_frsize, shared.f_bavail * shared.f_frsize)
        return NodeMemory(int(counters.get("oom_kill", 0)), *sizes)
