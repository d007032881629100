"""What every worker is: one rank of a role, in a process of its own."""

from __future__ import annotations

import datetime
import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mrl.config.mesh import Coordinates, Mesh
from mrl.controller.dispatch import Dispatch, register
from mrl.errors import PlacementError

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]


@dataclass
class Rendezvous:
    """Where the ranks of a group meet. Rank 0 brought its listening socket, so nobody can take the port meanwhile."""

    address: str
    port: int
    world_size: int
    listener: socket.socket | None

    def store(self, timeout_s: float) -> TCPStore:
        """Return the key-value store that torch.distributed starts from; rank 0 serves it on its own socket."""
        # Here, so that workers without tensors never load torch; it exports the name without saying so to mypy.
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
    """Who a worker is and where it stands."""

    role: str
    rank: int
    local_rank: int
    mesh: Mesh
    rendezvous: Rendezvous

    @property
    def coordinates(self) -> Coordinates:
        """This rank on every parallel axis."""
        return self.mesh.coordinates(self.rank)


class Worker:
    """Base of all workers. Methods marked with `register` can be called through the group."""

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
        """Return the GPU of this rank, as CUDA_VISIBLE_DEVICES names it."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            raise PlacementError(
                "Ray did not tell this process its GPU (CUDA_VISIBLE_DEVICES), so no engine can be put beside it",
                fix="unset RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES before Ray starts",
            )
        return visible

    @register(Dispatch.ONE_TO_ALL)
    def where(self) -> tuple[str, int]:
        """Return the node of this rank, and its number there."""
        return socket.gethostname(), self.place.local_rank

    def init_process_group(self, backend: str, timeout_s: float) -> None:
        """Join torch.distributed with the other ranks of this group."""
        import torch.distributed  # workers without tensors never load torch

        torch.distributed.init_process_group(
            backend,
            store=self.place.rendezvous.store(timeout_s),
            rank=self.rank,
            world_size=self.world_size,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
