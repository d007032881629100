"""The transfer of a rank's weights to the engines: its plan, buckets and messages, without the peers and the engine."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrl.config.schema import Config
from mrl.models.spec import ModelSpec
from mrl.rehearse.engine_weights import rollout_layout
from mrl.rehearse.stand_ins import Replaced
from mrl.weight_sync import resharder
from mrl.weight_sync.ipc import NUM_SLOTS, SharedBuffer
from mrl.weight_sync.resharder import WeightSyncSpec


def route_of(config: Config, spec: ModelSpec) -> WeightSyncSpec:
    """Return the transfer of a run to its engines."""
    layout = rollout_layout(config, spec)
    return WeightSyncSpec(
        layout=layout,
        sockets=(Path("engine"),) * len(layout.hosts),
        dtype=config.rollout.vllm.get("dtype", config.actor.dtype),
        trained_dtype=config.actor.dtype,
        bucket_bytes=config.sync.bucket_bytes,
    )


def without_engines() -> Replaced:
    """Replace the connection to an engine's worker, the messages to other ranks, and the digests of contents."""
    return [
        (resharder, "IpcSender", _Sender),
        (resharder, "Digests", _NoDigests),
        (WeightSyncSpec, "transport", lambda _, rank, device: _Transport(rank, device)),
    ]


class _Sender:
    """Makes the buckets that a rank shares with its engine's worker."""

    receiver = "no engine"

    def __init__(self, _path: Path, slot_bytes: int, _device: torch.device, _deadline_s: float) -> None:
        # Integers are real in a rehearsal, so the bytes are made of floats.
        buffers = [torch.empty(slot_bytes // 4).view(torch.uint8) for _ in range(NUM_SLOTS)]
        self._slots = itertools.cycle([SharedBuffer(number, buffer) for number, buffer in enumerate(buffers)])

    def begin(self, version: int) -> None:
        """No engine waits for this version."""

    def slot(self) -> SharedBuffer:
        return next(self._slots)

    def send(self, *_: Any) -> None:
        """No engine reads the bucket."""

    def end(self) -> None:
        """No engine returns digests."""

    def close(self) -> None:
        self._slots = itertools.cycle(())


class _NoDigests:
    def add(self, name: str, tensor: Tensor) -> None:
        """Fake tensors have no contents."""

    def read(self) -> dict[str, str]:
        return {}


class _Transport:
    """Messages that arrive at once."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self.rank, self.device = rank, device

    def start(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> Sequence[Any]:
        return []

    def barrier(self) -> None:
        """No other rank exists."""
