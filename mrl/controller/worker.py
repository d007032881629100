"""Base class of workers (one rank of a role in a separate process), and the declarations of their methods."""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

from mrl.config.mesh import Coordinates, Mesh
from mrl.config.step_calls import StepCall
from mrl.errors import PlacementError

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

Method = TypeVar("Method", bound=Callable[..., Any])

_SPEC_ATTRIBUTE = "mrl_method_spec"


class Dispatch(Enum):
    """How a method is called: on which ranks, with which arguments, and whose answers are returned."""

    ONE_TO_ALL = "one_to_all"
    """Every rank gets the same arguments. Returns a list of every rank's answer."""
    RANK_ZERO = "rank_zero"
    """Only rank 0 is called. Returns its answer."""
    FOLLOWERS = "followers"
    """Every rank except 0 is called once, when the group has started, and works until the group ends. It ends only by
    an error, which calls of rank 0 report."""
    DATA_PARALLEL = "data_parallel"
    """The first argument is a batch, split over the data-parallel axis.

    Ranks that differ only in tp, cp or pp get the same shard, and one of them answers for it. Columns are returned as
    one batch, other answers as a list.
    """


@dataclass(frozen=True)
class MethodSpec:
    """Declaration of a registered method: its dispatch, and the columns that it reads and writes."""

    name: str
    dispatch: Dispatch
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    optional: tuple[str, ...] = ()
    """Columns that the method reads if they exist."""
    stores: bool = False
    """Whether the method returns two values, of which the second stays in the object store. Only for RANK_ZERO."""


def register(
    dispatch: Dispatch,
    reads: tuple[str, ...] = (),
    writes: tuple[str, ...] = (),
    optional: tuple[str, ...] = (),
    *,
    stores: bool = False,
) -> Callable[[Method], Method]:
    """Make a worker's method callable through its group.

    A group sends only the columns in `reads` and `optional`, and accepts only the columns in `writes`: the declaration
    is enforced. Optional columns exist only in some algorithms.
    """
    if (reads or writes or optional) and dispatch is not Dispatch.DATA_PARALLEL:
        raise ValueError(f"only DATA_PARALLEL methods can read and write columns, not {dispatch.name} methods")
    if stores and dispatch is not Dispatch.RANK_ZERO:
        raise ValueError(f"only RANK_ZERO methods can store a second value, not {dispatch.name} methods")

    def mark(method: Method) -> Method:
        spec = MethodSpec(method.__name__, dispatch, tuple(reads), tuple(writes), tuple(optional), stores)
        setattr(method, _SPEC_ATTRIBUTE, spec)
        return method

    return mark


def register_call(call: StepCall) -> Callable[[Method], Method]:
    """Make a worker's method callable in a training step, with the columns in the step's table."""

    def mark(method: Method) -> Method:
        if method.__name__ != call.method:
            raise ValueError(f"the method {method.__name__} is registered as {call.method}")
        return register(Dispatch.DATA_PARALLEL, call.reads, call.writes, call.optional)(method)

    return mark


def registered_methods(worker_class: type) -> dict[str, MethodSpec]:
    """Return the methods of a class that a group may call, by name."""
    specs: dict[str, MethodSpec] = {}
    for name in dir(worker_class):
        spec = getattr(getattr(worker_class, name, None), _SPEC_ATTRIBUTE, None)
        if isinstance(spec, MethodSpec):
            specs[name] = spec
    return specs


@dataclass
class Rendezvous:
    """Meeting point of a group's ranks.

    Rank 0 keeps its listening socket open, so no other process can take the port.
    """

    address: str
    port: int
    world_size: int
    listener: socket.socket | None

    def hand_over(self) -> None:
        """Stop listening, so that a child process can listen at the port. The port stays reserved."""
        assert self.listener is not None, "only rank 0 has the port"
        family = self.listener.family
        self.listener.close()
        # Linux lets two sockets with this option share a port unless one of them listens.
        self.listener = socket.socket(family, socket.SOCK_STREAM)
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.listener.bind((self.address, self.port))

    def store(self, timeout_s: float) -> TCPStore:
        """Return the key-value store for torch.distributed. Rank 0 serves it on its own socket."""
        # A local import, so that workers without tensors never load torch. mypy does not know the exported name.
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        return TCPStore(
            self.address,
            self.port,
            self.world_size,
            is_master=self.listener is not None,
            timeout=datetime.timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=None if self.listener is None else self.listener.detach(),
        )


@dataclass
class RankInfo:
    """Identity and place of a worker."""

    role: str
    rank: int
    local_rank: int
    mesh: Mesh
    rendezvous: Rendezvous

    @property
    def coordinates(self) -> Coordinates:
        return self.mesh.coordinates(self.rank)


class Worker:
    """Base class of all workers. Methods marked with `register` can be called through the group."""

    working_thread = "MainThread"
    """Thread whose spans count as work in a trace. The others only wait for it."""

    def __init__(self, place: RankInfo) -> None:
        self.place = place

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def world_size(self) -> int:
        return self.place.mesh.world_size

    @register(Dispatch.ONE_TO_ALL)
    def visible_gpus(self) -> str:
        """Return the GPU of this rank, as listed in CUDA_VISIBLE_DEVICES."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            raise PlacementError(
                "Ray did not set CUDA_VISIBLE_DEVICES, so no engine can share the unknown GPU of this process",
                fix="unset RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES before Ray starts",
            )
        return visible

    @register(Dispatch.ONE_TO_ALL)
    def where(self) -> tuple[str, int]:
        """Return the node's name, and this rank's number on the node."""
        return socket.gethostname(), self.place.local_rank

    def init_process_group(self, backend: str, timeout_s: float) -> None:
        import torch.distributed  # workers without tensors never load torch

        torch.distributed.init_process_group(
            backend,
            store=self.place.rendezvous.store(timeout_s),
            rank=self.rank,
            world_size=self.world_size,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
