"""How the ranks of a weight exchange reach each other: in the trainer's world, or in a larger one of their own."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

Addressed = tuple[Tensor, int]
"""A buffer, and the rank that it goes to or comes from."""


class P2PTransport(Protocol):
    """Point-to-point messages between ranks."""

    rank: int
    device: torch.device

    def start(self, outgoing: Sequence[Addressed], incoming: Sequence[Addressed]) -> Sequence[dist.Work]:
        """Begin to send and receive; the buffers are the messages' until the works have been waited for."""

    def barrier(self) -> None:
        """Wait until every rank is here."""


class WorldTransport:
    """The trainer's own world: engines on the trainer's devices need nobody else."""

    def __init__(self, device: torch.device) -> None:
        self.rank, self.device = dist.get_rank(), device

    def start(self, outgoing: Sequence[Addressed], incoming: Sequence[Addressed]) -> Sequence[dist.Work]:
        """As one batch."""
        messages = [dist.P2POp(dist.isend, buffer, rank) for buffer, rank in outgoing]
        messages += [dist.P2POp(dist.irecv, buffer, rank) for buffer, rank in incoming]
        return dist.batch_isend_irecv(messages) if messages else []

    def barrier(self) -> None:
        """Wait for the world."""
        dist.barrier()


class JoinedTransport:
    """A world of trainer ranks and of receivers, who stand on the engines' devices.

    Megatron takes torch's default world for its own, so this one is a process group beside it, which no other call
    can reach.
    """

    def __init__(self, store: Store, rank: int, size: int, device: torch.device, timeout_s: float) -> None:
        self.rank, self.device = rank, device
        timeout = datetime.timedelta(seconds=timeout_s)
        # torch's types know neither the constructors of its process groups nor their messages.
        self._group: Any
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            self._group = dist.ProcessGroupGloo(store, rank, size, timeout)

    def start(self, outgoing: Sequence[Addressed], incoming: Sequence[Addressed]) -> Sequence[dist.Work]:
        """One by one: each pair of ranks has a connection of its own, so none waits for another."""
        works = [self._group.send([buffer], rank, 0) for buffer, rank in outgoing]
        return works + [self._group.recv([buffer], rank, 0) for buffer, rank in incoming]

    def barrier(self) -> None:
        """Wait for trainer and receivers."""
        self._group.barrier().wait()
