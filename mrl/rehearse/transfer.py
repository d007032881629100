"""The transfer of a rank's weights to the engines: its plan, buckets and messages, without the peers and the engine."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrl.config.arithmetic import held_dtype, shard_size
from mrl.config.schema import Config
from mrl.models.regions import Region
from mrl.models.spec import ModelSpec
from mrl.rehearse.engine_weights import RehearsalError, rollout_layout
from mrl.rehearse.stand_ins import Replaced
from mrl.weight_sync import exchange, resharder
from mrl.weight_sync.exchange import WeightExchange
from mrl.weight_sync.ipc import NUM_SLOTS, SharedBuffer
from mrl.weight_sync.planner import Transfer
from mrl.weight_sync.resharder import WeightSyncSpec


def route_of(config: Config, spec: ModelSpec) -> WeightSyncSpec:
    """Return the transfer of a run to its engines."""
    layout = rollout_layout(config, spec)
    return WeightSyncSpec(
        layout=layout,
        sockets=(Path("engine"),) * len(layout.hosts),
        dtype=config.rollout.vllm.get("dtype", config.actor.dtype),
        trained_dtype=held_dtype(config.actor),
        shard_size=shard_size(config, "actor"),
        bucket_bytes=config.sync.bucket_bytes,
    )


def without_engines() -> Replaced:
    """Replace the connection to an engine's worker, the messages to other ranks, and the digests of contents.

    Copies of pieces are only checked: they make no memory, and a mixture has a hundred thousand of them.
    """
    return [
        (resharder, "IpcSender", _Sender),
        (resharder, "Digests", _NoDigests),
        (WeightExchange, "copy_local", _copy_local),
        (WeightExchange, "_pack", _pack),
        (exchange, "_finish", _finish),
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


def _copy_local(self: WeightExchange, transfers: Sequence[Transfer], matrices: Sequence[Tensor]) -> None:
    _check_sources(self, transfers)
    _check_targets(transfers, matrices)


def _pack(self: WeightExchange, transfers: Sequence[Transfer], buffer: Tensor) -> Tensor:
    _check_sources(self, transfers)
    return buffer[: sum(transfer.region.num_elements for transfer in transfers)]


def _finish(_works: Any, transfers: Sequence[Transfer], _buffer: Tensor, matrices: Sequence[Tensor] | None) -> None:
    if matrices is not None:
        _check_targets(transfers, matrices)


def _check_sources(self: WeightExchange, transfers: Sequence[Transfer]) -> None:
    for transfer in transfers:
        for piece in transfer.region.copies:
            name = transfer.site.prefix + piece.name
            _check_inside(piece.source, self._held[transfer.site.chunk, name], name)


def _check_targets(transfers: Sequence[Transfer], matrices: Sequence[Tensor]) -> None:
    for transfer in transfers:
        for piece in transfer.region.copies:
            _check_inside(piece.target, matrices[transfer.tensor], f"tensor {transfer.tensor} of the bucket")


def _check_inside(box: Region, tensor: Tensor, name: str) -> None:
    if any(not 0 <= start < stop <= size for (start, stop), size in zip(box, tensor.shape, strict=False)):
        raise RehearsalError(f"the piece {box} is outside of {name} with the shape {tuple(tensor.shape)}")


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
