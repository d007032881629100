"""One small actor per node: it looks at the processes there, when a worker itself can no longer speak."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mrl.children import children_of
from mrl.controller.diagnosis import NodeMemory, kernel_view, native_frames
from mrl.controller.network import Endpoint, Network, failures, listen_everywhere, network
from mrl.controller.worker_log import STACK_SIGNAL, stack_path, tail

_STACK_WAIT_S = 1.0
_END_WAIT_S = 0.5


@dataclass(frozen=True)
class ProcessId:
    """A process, told apart from a later one that got the same number by when it started."""

    pid: int
    start_ticks: int


@dataclass(frozen=True)
class ProcessView:
    """What a node sees of a process: the kernel's state letter, or none where it is gone."""

    state: str | None

    @property
    def is_gone(self) -> bool:
        """Whether the process ended (a zombie has ended too)."""
        return self.state is None or self.state in "ZX"

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger holds the process."""
        return self.state is not None and self.state in "Tt"


def read_process(pid: int) -> tuple[str, int] | None:
    """Return the state letter and start time of a process, from the kernel; None where there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the command before the last bracket may hold anything
    return fields[0], int(fields[19])


def view(process: ProcessId) -> ProcessView:
    seen = read_process(process.pid)
    same = seen is not None and seen[1] == process.start_ticks
    return ProcessView(seen[0] if seen is not None and same else None)


def own_process() -> ProcessId:
    seen = read_process(os.getpid())
    assert seen is not None, "a running process is visible to itself"
    return ProcessId(os.getpid(), seen[1])


def _job_of(pid: int | str) -> bytes:
    """Return the job that Ray started a worker for; empty where it was none, or has ended."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return b""
    return next((variable for variable in variables if variable.startswith(b"RAY_JOB_ID=")), b"")


class NodeLost(Exception):
    """The agent still runs, and its node is no longer part of the cluster."""


class NodeAgent:
    """Looks, reads and ends; it knows nothing of roles or batches."""

    def __init__(self) -> None:
        self._raylet = os.getppid()
        self._listeners: list[socket.socket] = []
        self._heard = 0.0

    def hear(self, limit_s: float) -> None:
        """Note that the run's driver lives. Once it says nothing for this long, its processes on this node end."""
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
                    os.kill(pid, signal.SIGKILL)  # out of reach it would go on writing into the run's directory
        os.kill(os.getpid(), signal.SIGKILL)

    def describe(self) -> tuple[str, str]:
        """Return the node's name, and how its Ray authenticates its callers."""
        return socket.gethostname(), os.environ.get("RAY_AUTH_MODE", "disabled")

    def sees(self, path: str) -> bool:
        """Return whether a file is visible on this node: a run directory must be, on every node."""
        return Path(path).is_file()

    def network(self, address: str) -> Network:
        """Return how this node uses the network of an address of its own."""
        return network(address)

    def listen(self, address: str) -> list[Endpoint]:
        """Open sockets where other nodes may try to reach this one, until it has tried to reach them."""
        sockets = listen_everywhere(address)
        self._listeners = [each for each, _ in sockets]
        return [endpoint for _, endpoint in sockets]

    def failures(self, endpoints: list[Endpoint], limit_s: float) -> list[str]:
        """Return why each of these is out of this node's reach; empty where it is not."""
        return failures(endpoints, limit_s)

    def stop_listening(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._listeners = []

    def poll_states(self, processes: list[ProcessId]) -> list[ProcessView]:
        """The state of each process. Where the node's raylet has died they are all gone: Ray ends them one by one."""
        if os.getppid() != self._raylet:
            return [ProcessView(None)] * len(processes)
        return [view(process) for process in processes]

    def stack(self, process: ProcessId, log: str) -> str:
        """Return the Python stacks of a process, also of one that was stopped: it is woken to write them.

        Only asked for when a call has failed and the process is about to be ended.
        """
        path = stack_path(Path(log))
        if view(process).is_gone:
            return "its process is gone"
        if not path.is_file():
            return "none: it has not come to opening its log"  # and the signal would end it
        before = path.stat().st_size
        os.kill(process.pid, STACK_SIGNAL)
        os.kill(process.pid, signal.SIGCONT)
        deadline = time.monotonic() + _STACK_WAIT_S
        size = before
        while time.monotonic() < deadline:
            time.sleep(0.05)
            now = path.stat().st_size
            if now > before and now == size:
                break
            size = now
        with path.open("rb") as file:
            file.seek(before)
            return file.read().decode("utf-8", "replace").strip() or "it does not answer even a signal"

    def threads(self, process: ProcessId) -> tuple[str, str]:
        """The native frames of a process, and what the kernel says of its threads; of one that is gone, nothing."""
        if view(process).is_gone:
            return "", ""
        return native_frames(process.pid), kernel_view(process.pid)

    def tail(self, log: str, num_lines: int) -> str:
        return tail(Path(log), num_lines)

    def first_words(self, pid: int, num_lines: int) -> str:
        """The last lines of what a worker wrote before it opened a log of its own: Ray keeps them, as it does ours."""
        ours = Path(os.readlink("/proc/self/fd/2"))
        return "\n".join(tail(log, num_lines) for log in sorted(ours.parent.glob(f"worker-*-{pid}.err")))

    def kill_all(self, processes: list[ProcessId]) -> None:
        """See that processes end which Ray was told to kill: after a moment, by SIGKILL.

        Ray asks a process to end itself, which one that is stopped or stuck in a collective never does.
        """
        deadline = time.monotonic() + _END_WAIT_S
        while (running := [process for process in processes if not view(process).is_gone]) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.02)
        for process in running:
            os.kill(process.pid, signal.SIGKILL)

    def memory(self) -> NodeMemory:
        """Return what this node says of memory that ran out."""
        if os.getppid() != self._raylet:
            raise NodeLost("the raylet of this node has died")
        counters = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        shared = os.statvfs("/dev/shm")
        sizes = (shared.f_blocks * shared.f_frsize, shared.f_bavail * shared.f_frsize)
        return NodeMemory(int(counters.get("oom_kill", 0)), *sizes)
