"""The way of the weights from the trainer into the engines, as every rank that takes part is told it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from mrl.controller import Rendezvous
from mrl.dtypes import torch_dtype
from mrl.weight_sync.ipc import socket_path
from mrl.weight_sync.planner import RolloutLayout
from mrl.weight_sync.resharder import ReshardSettings
from mrl.weight_sync.transport import JoinedTransport, P2PTransport, WorldTransport


@dataclass(frozen=True)
class WeightSyncSpec:
    """Which engines there are, where they listen, and where the ranks meet."""

    layout: RolloutLayout
    sockets: Path
    engines: tuple[str, ...]
    """The engine of each worker."""
    dtype: str
    """Of the engines' parameters."""
    trained_dtype: str
    """Of the trainer's."""
    bucket_bytes: int
    timeout_s: float
    rendezvous: Rendezvous | None
    """Where trainer ranks and receivers meet; None where the engines are on the trainer's devices."""

    def socket_paths(self) -> dict[int, Path]:
        """Where each worker of the engines listens."""
        tp = self.layout.sizes.tp
        return {worker: socket_path(self.sockets, name, worker % tp) for worker, name in enumerate(self.engines)}

    def settings(self) -> ReshardSettings:
        """How the weights travel."""
        return ReshardSettings(torch_dtype(self.dtype), torch_dtype(self.trained_dtype), self.bucket_bytes)

    def transport(self, rank: int, device: torch.device) -> P2PTransport:
        """Join the others."""
        if self.rendezvous is None:
            return WorldTransport(device)
        size = len(self.layout.nodes)
        return JoinedTransport(self.rendezvous.store(self.timeout_s), rank, size, device, self.timeout_s)
