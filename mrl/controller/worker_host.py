"""The Ray actor around a worker: creates the worker, runs its methods, and turns every outcome into an answer."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import ray

from mrl.config.mesh import Mesh
from mrl.controller.network import listen
from mrl.controller.node_agent import ProcessId, own_process
from mrl.controller.node_calls import ANSWERED, RAISED, STAYS, is_small
from mrl.controller.transport import ColumnStore, ShardPlan, assemble_shard, pack_result
from mrl.controller.worker import MethodSpec, RankInfo, Rendezvous, Worker, registered_methods
from mrl.controller.worker_log import log_path, redirect_output
from mrl.errors import MrlError
from mrl.protocol import DataProto
from mrl.redaction import redact_text
from mrl.registry import load_attribute
from mrl.spans import SPANS

ShardMessage: TypeAlias = list[Any]
"""A call on a shard: `[method, whether this rank answers, args, kwargs, the shard's plan]`.

It is one list, because Ray processes every argument of a call separately.
"""


@dataclass(frozen=True)
class ProcessInfo:
    """Facts that a new process reports."""

    process: ProcessId
    node_id: str
    port: int


@dataclass(frozen=True)
class WorkerSpec:
    """Everything that a process needs to become a worker of a group."""

    worker_class: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    role: str
    rank: int
    local_rank: int
    mesh: Mesh
    log_directory: Path
    address: str
    port: int
    environment: dict[str, str]
    numa_binding: bool
    """Whether to run on the CPUs next to the process's GPUs."""
    python_path: list[str]
    """The driver's import path, so that workers can load every class that the driver can."""


class RankFailed(Exception):
    """A method raised an error. Only text is sent to the driver, so that any exception can be reported."""

    def __init__(self, kind: str, message: str, trace: str, at: float) -> None:
        super().__init__(kind, message, trace, at)
        self.kind = kind
        self.message = message
        self.trace = trace
        self.at = at


class WorkerHost:
    """A process that becomes one worker."""

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._methods: dict[str, MethodSpec] = {}
        self._listener: socket.socket | None = None

    def handshake(self, address: str | None) -> ProcessInfo:
        """Return process, node and port. Rank 0 gets an address, and opens the port where its group will meet."""
        port = 0
        if address is not None:
            self._listener = listen(address)
            port = self._listener.getsockname()[1]
        return ProcessInfo(own_process(), ray.get_runtime_context().get_node_id(), port)

    def start(self, order: WorkerSpec) -> dict[str, MethodSpec]:
        """Create the worker that the order describes. Return its callable methods."""
        try:
            redirect_output(log_path(order.log_directory, order.rank))
            os.environ.update(order.environment)
            _keep_temporary_files_in(Path(ray._private.worker._global_node.get_temp_dir_path()))
            if order.numa_binding and (visible := os.environ.get("CUDA_VISIBLE_DEVICES")):
                sys.stderr.write(bind_to_gpus(visible) + "\n")  # before libraries start threads or pin memory
            sys.path.extend(entry for entry in order.python_path if entry not in sys.path)
            gc.disable()  # garbage collection would take a fifth of the import time
            worker_class = load_attribute(order.worker_class)
            self._methods = registered_methods(worker_class)
            rendezvous = Rendezvous(order.address, order.port, order.mesh.world_size, self._listener)
            place = RankInfo(order.role, order.rank, order.local_rank, order.mesh, rendezvous)
            self._worker = worker_class(place, *order.args, **order.kwargs)
            gc.freeze()  # objects from start-up stay: scanning them again would only delay calls
            gc.enable()
        except BaseException as error:
            raise _as_failure(error) from None
        return self._methods

    def trace(self, path: str | None) -> tuple[str, int, str]:
        """Record spans in this file, or stop. Return the thread that works, and, at the end, nanoseconds that recording
        took, and why spans are missing.
        """
        thread = self._worker.working_thread if self._worker is not None else ""
        if path is None:
            return thread, SPANS.end(), SPANS.lost
        SPANS.begin(Path(path))
        return thread, 0, ""

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        try:
            with SPANS(method):
                return getattr(self._worker, method)(*args, **kwargs)
        except BaseException as error:
            raise _as_failure(error) from None

    def call_on_shard(self, message: ShardMessage, *objects: ColumnStore) -> Any:
        """Run one method on a shard. Columns that it writes are a second returned object, which stays in this node's
        store.

        A rank that does not answer for its shard computes the same, but returns nothing.
        """
        try:
            method, answers, args, kwargs, plan = message
            with SPANS(method) as facts:
                with SPANS("read columns"):
                    shard = assemble_shard(plan, objects)
                facts["rows"] = len(shard)
                facts["bytes"] = sum(len(body) for columns in objects for _, body in columns.values())
                result = getattr(self._worker, method)(shard, *args, **kwargs)
            if not answers:
                return None
            writes = self._methods[method].writes
            if isinstance(result, DataProto):
                return pack_result(result, shard.row_ids, writes, method)
            if writes:
                raise TypeError(f"{method} declares {list(writes)} but returned {type(result).__name__}")
            return result
        except BaseException as error:
            raise _as_failure(error) from None

    def call_for_node(
        self, method: str, speaks: bool, arguments: Any, plan: ShardPlan | None, *objects: ColumnStore
    ) -> tuple[Any, ...]:
        """Run one method for the agent of this node. Return what the agent reads, the answer if it does not read it,
        and the columns if this rank writes any.

        Errors are values: the agent cannot load their class.
        """
        args, kwargs = arguments
        stored = self._methods[method].writes and speaks and plan is not None
        try:
            if plan is None:
                answer = self.call(method, *args, **kwargs)
            else:
                answer = self.call_on_shard([method, speaks, args, kwargs, plan], *objects)
        except RankFailed as failure:
            return [RAISED, failure.message, failure.at, failure.trace], *[None] * (2 if stored else 1)
        answer, *columns = answer if stored else (answer,)
        outcome = ([ANSWERED, answer], None) if is_small(answer) else ([STAYS], answer)
        return *outcome, *columns


def _as_failure(error: BaseException) -> RankFailed:
    """Return the error as text.

    All errors are caught, even SystemExit: an unreported failure would be a hang elsewhere.
    """
    message = str(error) if isinstance(error, MrlError) else f"{type(error).__name__}: {error}"
    trace = redact_text("".join(traceback.format_exception(error)))
    os.write(2, trace.encode("utf-8", "backslashreplace"))
    return RankFailed(type(error).__name__, redact_text(message), trace, time.time())


def _keep_temporary_files_in(directory: Path) -> None:
    """Put temporary files of this process and its children into the directory of its Ray, because killed processes
    leave them.

    If a user's Ray has a public directory, temporary files stay at their usual place.
    """
    if any(parent.is_dir() and parent.stat().st_mode & 0o077 == 0 for parent in (directory, directory.parent)):
        os.environ["TMPDIR"] = tempfile.tempdir = str(directory)


_QUERY = ("nvidia-smi", "--query-gpu=index,uuid,pci.bus_id", "--format=csv,noheader")
_QUERY_TIMEOUT_S = 30.0


def bind_to_gpus(visible: str, sysfs: Path = Path("/sys")) -> str:
    """Bind this process and its children to the CPUs next to these GPUs. Return a sentence about it, empty if none
    applies.

    `visible` is the value of CUDA_VISIBLE_DEVICES. Machines with one NUMA node, and some virtual machines, report
    nothing.
    """
    try:
        output = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"not bound to the CPUs next to its GPUs: {error}"
    rows = [[cell.strip() for cell in line.split(",")] for line in output.splitlines()]
    addresses = [pci for index, uuid, pci in rows if {index, uuid} & {*visible.split(",")}]
    nodes = {node for pci in addresses if (node := _node(pci, sysfs)) is not None}
    cpus = {cpu for node in nodes for cpu in _cpus(sysfs / f"devices/system/node/node{node}/cpulist")}
    allowed = os.sched_getaffinity(0)
    if not cpus or cpus >= allowed:
        return ""
    if not cpus & allowed:
        return f"not bound to NUMA node {_text(nodes)} of its GPUs: the job has no CPUs of this node"
    os.sched_setaffinity(0, cpus & allowed)
    return f"bound to {len(cpus & allowed)} CPUs of NUMA node {_text(nodes)}, next to GPU {visible}"


def _node(pci: str, sysfs: Path) -> int | None:
    """Return the NUMA node of a device. The driver writes eight digits of the PCI domain, the kernel four."""
    domain, _, rest = pci.lower().partition(":")
    path = sysfs / f"bus/pci/devices/{domain[-4:]}:{rest}/numa_node"
    node = int(path.read_text()) if path.is_file() else -1
    return node if node >= 0 else None


def _cpus(path: Path) -> Iterator[int]:
    """Yield the CPU numbers of a list in the kernel's format: `0-31,64-95`."""
    for part in path.read_text().strip().split(",") if path.is_file() else ():
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _text(nodes: set[int]) -> str:
    return " and ".join(map(str, sorted(nodes)))
