"""Ranks as processes on this machine, over gloo, or NCCL with one GPU each; for `mrl verify`, benchmarks and tests."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from typing import Any, Literal

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from mrl.children import die_with
from mrl.engine.parallel import take_device
from mrl.errors import EngineError

Device = Literal["cpu", "gpu"]


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
    processes, ends = [], []
    try:
        for rank in range(num_ranks):
            own_end, rank_end = context.Pipe()
            place = (rank, num_ranks, listener.getsockname()[1], listener if rank == 0 else None)
            with _environment(device):
                order = (rank_end, place, dict(os.environ), function, arguments)
                process = context.Process(target=_rank_main, args=order, daemon=True)  # type: ignore[attr-defined]
                process.start()
            rank_end.close()
            processes.append(process)
            ends.append(own_end)
        return _collect(ends, timeout_s)
    finally:
        listener.close()
        for process in processes:
            process.join(0.5)
            process.kill()
            process.join()


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


def _collect(ends: list[Connection], timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(ends):
        silent = [rank for rank in range(len(ends)) if rank not in results]
        ready = wait([ends[rank] for rank in silent], timeout_s)
        if not ready:
            raise EngineError(f"ranks {silent} of {len(ends)} did not answer within {timeout_s:g} s")
        for rank in [rank for rank in silent if ends[rank] in ready]:
            try:
                succeeded, result = ends[rank].recv()
            except EOFError:
                raise EngineError(f"the process of rank {rank} of {len(ends)} ended without an answer") from None
            if not succeeded:
                raise EngineError(f"rank {rank} of {len(ends)} failed:\n{result}")
            results[rank] = result
    return [results[rank] for rank in range(len(ends))]


def _rank_main(
    end: Connection,
    place: tuple[int, int, int, socket.socket | None],
    environment: Mapping[str, str],
    function: Callable[..., Any],
    arguments: Any,
) -> None:
    rank, num_ranks, port, listener = place
    os.environ.clear()  # inherited from the fork server, and outdated
    os.environ.update(environment)
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
