"""Ranks as processes on this machine, over gloo, or NCCL with one GPU each; for `mrl verify`, benchmarks and tests."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import socket
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any, Literal

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from mrl.children import die_with
from mrl.engine.parallel import take_device
from mrl.errors import EngineError

Device = Literal["cpu", "gpu"]
_END_S = 5.0
"""Seconds for a process that has closed its connection to end; the kernel may be writing a core file."""
_MAX_STACK_BYTES = 65536  # what a pipe holds


@dataclass(frozen=True)
class _Rank:
    process: BaseProcess
    answer: Connection
    crash: Connection
    """Receives the Python stacks of the process if a signal such as SIGSEGV ends it."""


def num_gpus() -> int:
    """Return the largest number of ranks that can have their own GPU."""
    return torch.cuda.device_count()


def run_distributed(
    num_ranks: int, function: Callable[..., Any], *arguments: Any, timeout_s: float, device: Device = "cpu"
) -> list[Any]:
    """Call `function(*arguments)` on each rank of a new world, which is removed afterwards. Return the results of all
    ranks.

    The function must be importable by name, and its arguments and results must be picklable. With "gpu" there are at
    most `num_gpus` ranks.
    """
    context = _context(device)
    listener = socket.create_server(("127.0.0.1", 0))  # rank 0 inherits it, so no other process can take the port
    ranks: list[_Rank] = []
    try:
        for number in range(num_ranks):
            answer, answer_end = context.Pipe()
            crash, crash_end = context.Pipe(duplex=False)
            place = (number, num_ranks, listener.getsockname()[1], listener if number == 0 else None)
            with _environment(device):
                order = (answer_end, crash_end, place, dict(os.environ), function, arguments)
                process = context.Process(target=_rank_main, args=order, daemon=True)  # type: ignore[attr-defined]
                process.start()
            answer_end.close()
            crash_end.close()
            ranks.append(_Rank(process, answer, crash))
        return _collect(ranks, timeout_s)
    finally:
        listener.close()
        for rank in ranks:
            rank.process.join(0.5)
            rank.process.kill()
            rank.process.join()


def _context(device: Device) -> BaseContext:
    """Return the start method: on CPUs, fork from a server that has loaded the slow imports; on GPUs, spawn.

    A process cannot use GPUs if its parent has called CUDA, even just to count devices.
    """
    if device == "gpu":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["transformers.models.auto.modeling_auto", "mrl.engine.engine"])
    return context


@contextmanager
def _environment(device: Device) -> Iterator[None]:
    """Set the environment in which processes start: they import torch, which looks for GPUs, before any code of mrl."""
    variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    if device == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def _collect(ranks: list[_Rank], timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(ranks):
        silent = [number for number in range(len(ranks)) if number not in results]
        ready = wait([ranks[number].answer for number in silent], timeout_s)
        if not ready:
            raise EngineError(f"ranks {silent} of {len(ranks)} did not answer within {timeout_s:g} s")
        for number in [number for number in silent if ranks[number].answer in ready]:
            try:
                succeeded, result = ranks[number].answer.recv()
            except EOFError:
                ending = _describe_ending(ranks[number])
                raise EngineError(f"rank {number} of {len(ranks)} ended without an answer: {ending}") from None
            if not succeeded:
                raise EngineError(f"rank {number} of {len(ranks)} failed:\n{result}")
            results[number] = result
    return [results[number] for number in range(len(ranks))]


def _describe_ending(rank: _Rank) -> str:
    """Say how a process ended that closed its connection, with its Python stacks if it crashed."""
    rank.process.join(_END_S)
    code = rank.process.exitcode
    if code is None:
        return f"process {rank.process.pid} closed its connection, but still runs {_END_S:g} s later"
    if code >= 0:
        return f"process {rank.process.pid} exited with status {code}"
    stacks = os.read(rank.crash.fileno(), _MAX_STACK_BYTES).decode(errors="replace") if rank.crash.poll() else ""
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"{name} ({signal.strsignal(-code)}) ended process {rank.process.pid}\n{stacks}".rstrip()


def _rank_main(
    end: Connection,
    crash: Connection,
    place: tuple[int, int, int, socket.socket | None],
    environment: Mapping[str, str],
    function: Callable[..., Any],
    arguments: Any,
) -> None:
    rank, num_ranks, port, listener = place
    os.environ.clear()  # inherited from the fork server, and outdated
    os.environ.update(environment)
    os.set_blocking(crash.fileno(), False)  # a full pipe must not delay the end of a crashed process
    faulthandler.enable(crash.fileno())
    die_with(os.getppid())  # otherwise a rank could wait in gloo forever
    backend = take_device(rank)
    limit = timedelta(minutes=10)
    store = TCPStore(
        "127.0.0.1",
        port,
        world_size=num_ranks,
        is_master=rank == 0,
        timeout=limit,
        master_listen_fd=listener.detach() if listener is not None else None,
    )
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=limit)
    try:
        end.send((True, function(*arguments)))
    except Exception:
        end.send((False, traceback.format_exc(limit=-12)))
    torch.distributed.destroy_process_group()
