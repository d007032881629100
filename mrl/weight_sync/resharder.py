"""Carries out a plan: weights from Megatron's shards into the rollout workers on the same devices, and checks them.

Every rank fills one bucket after another with the fused tensors of the worker on its device: from its own parameters,
and from messages. A full bucket is the worker's to read while the next is filled. No full tensor stands anywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from mrl.controller import Rendezvous
from mrl.dtypes import torch_dtype
from mrl.errors import EngineError, RolloutError
from mrl.models.regions import slices
from mrl.weight_sync.digest import Digests
from mrl.weight_sync.exchange import (
    Held,
    JoinedTransport,
    P2PTransport,
    WeightExchange,
    WorldTransport,
    message_schedule,
)
from mrl.weight_sync.ipc import ALIGNMENT_BYTES, NUM_SLOTS, IpcSender, SharedBuffer, TensorView
from mrl.weight_sync.planner import BucketSizes, PlannedBucket, ReshardPlanner, RolloutLayout

T = TypeVar("T")

_SLOT_SHARE = 0.75
"""Of the memory for two buckets; the rest is for messages, which are sent from two buffers and received in two."""
_MESSAGE_SHARE = (1 - _SLOT_SHARE) / 2
_MAX_NAMED = 8


@dataclass(frozen=True)
class WeightSyncSpec:
    """What every rank that takes part is told: where the engines are, how weights travel, and where ranks meet."""

    layout: RolloutLayout
    sockets: tuple[Path, ...]
    """Where each worker of the engines listens."""
    dtype: str
    """Of the engines' parameters."""
    trained_dtype: str
    """Of the trainer's."""
    bucket_bytes: int = 256 << 20
    """Twice this is the extra memory on a device, or what two of the largest tensor need."""
    worker_timeout_s: float = 120.0
    """How long a worker of an engine may take over a bucket."""
    timeout_s: float = 120.0
    """How long a rank waits for others."""
    rendezvous: Rendezvous | None = None
    """Where trainer ranks and receivers meet; None where the engines are on the trainer's devices."""

    def transport(self, rank: int, device: torch.device) -> P2PTransport:
        """Join the others."""
        if self.rendezvous is None:
            return WorldTransport(device)
        size = len(self.layout.nodes)
        return JoinedTransport(self.rendezvous.store(self.timeout_s), rank, size, device, self.timeout_s)


@dataclass(frozen=True)
class ReshardReport:
    """What one rank moved for one version, as counted where it passed."""

    version: int
    worker: int | None
    """The worker on this rank's device, if it took part."""
    bytes_sent: int
    bytes_received: int
    least_bytes: int
    """What this rank had to receive in any case: its worker needs it, and it does not hold it."""
    num_transfers: int
    """Messages sent."""
    num_buckets: int
    extra_bytes: int
    """Memory that was held for the transfer beside parameters."""
    seconds: float
    failure: str
    """Why the worker did not take the weights, if so; the other workers have got theirs."""


class Resharder:
    """Plans once, then sends each version; it is made on all ranks at once, and `send` is called so."""

    def __init__(self, planner: ReshardPlanner, transport: P2PTransport, held: Held, spec: WeightSyncSpec) -> None:
        self.planner, self._held, self._spec, self._transport = planner, held, spec, transport
        self._dtype, trained_dtype = torch_dtype(spec.dtype), torch_dtype(spec.trained_dtype)
        if strange := {tensor.dtype for tensor in held.values()} - {trained_dtype}:
            names = ", ".join(sorted(map(str, strange)))
            raise EngineError(f"the trainer's parameters are to be {trained_dtype}, and some are {names}")
        # Rounding commutes with moving, so the narrower of the two dtypes travels.
        self._travels_as = min(self._dtype, trained_dtype, key=lambda dtype: dtype.itemsize)
        largest = planner.largest_tensor() * self._dtype.itemsize
        self._slot_bytes = max(int(spec.bucket_bytes * _SLOT_SHARE), largest)
        sizes = BucketSizes(self._slot_bytes, self._dtype.itemsize, ALIGNMENT_BYTES)
        self.plan = planner.plan(transport.rank, sizes)
        least = planner.least_received(transport.rank)
        assert self.plan.num_received() == least, f"the plan moves {self.plan.num_received()} elements for {least}"
        self._least_bytes = least * self._travels_as.itemsize
        self._limit = int(self._slot_bytes * _MESSAGE_SHARE / _SLOT_SHARE) // self._travels_as.itemsize
        self._steps = [message_schedule(self.plan, bucket, self._limit) for bucket in self.plan.buckets]
        # NCCL connects a group in its first call, for which it needs every rank; a step concerns a few.
        transport.barrier()

    @torch.no_grad()
    def send(self, version: int, workers: Collection[int] | None = None) -> ReshardReport:
        """Bring all workers, or those named, to this version; all ranks name the same.

        Weights that arrive otherwise than they were sent are an error. A worker that is gone is not: it is reported,
        so that no trainer rank has to be stopped for a worker that will be replaced.
        """
        began = time.perf_counter()
        plan = self.plan
        receiving_ranks = {host for host, worker in plan.worker_of.items() if workers is None or worker in workers}
        exchange = WeightExchange(self._held, self._transport, self._travels_as, self._limit)
        delivery = self._delivery(version) if plan.rank in receiving_ranks else None
        for bucket, planned in zip(plan.buckets, self._steps, strict=True):
            matrices = delivery.open(bucket) if delivery else None
            if matrices is not None:
                exchange.copy_local(bucket.incoming.get(plan.rank, ()), matrices)
            exchange.run(planned, receiving_ranks, matrices)
            if matrices is not None and delivery:
                delivery.publish()
        if delivery:
            delivery.end()
        return ReshardReport(
            version=version,
            worker=plan.worker if delivery else None,
            bytes_sent=exchange.bytes_sent,
            bytes_received=exchange.bytes_received,
            least_bytes=self._least_bytes if delivery else 0,
            num_transfers=exchange.num_transfers,
            num_buckets=len(plan.buckets),
            extra_bytes=exchange.extra_bytes + (NUM_SLOTS * self._slot_bytes if delivery else 0),
            seconds=time.perf_counter() - began,
            failure=delivery.failure if delivery else "",
        )

    def _delivery(self, version: int) -> EngineTransfer:
        assert self.plan.worker is not None, "a rank without a worker takes nothing"
        path, device = self._spec.sockets[self.plan.worker], self._transport.device
        sender = IpcSender(path, self._slot_bytes, device, self._spec.worker_timeout_s)
        return EngineTransfer(sender, version, self._dtype)


class EngineTransfer:
    """One version on its way to one worker. A worker that fails is let go, and why is kept."""

    def __init__(self, sender: IpcSender, version: int, dtype: torch.dtype) -> None:
        self._sender, self._version, self._dtype = sender, version, dtype
        self._digests = Digests()
        self._open: tuple[SharedBuffer, list[TensorView], list[Tensor]] | None = None
        self.failure = ""
        self._try(lambda: sender.begin(version))

    def open(self, bucket: PlannedBucket) -> list[Tensor] | None:
        """The tensors of a bucket as matrices to be filled, their padding in place; None where there is no need."""
        slot = self._try(self._sender.slot) if bucket.tensors else None
        if slot is None:
            return None
        placed = [TensorView(each.name, self._dtype, each.fused.shape, each.offset) for each in bucket.tensors]
        views = [each.view(slot.buffer) for each in placed]
        self._open = slot, placed, views
        matrices = [view.view(-1, view.shape[-1]) if view.ndim > 2 else view for view in views]
        for matrix, each in zip(matrices, bucket.tensors, strict=True):
            for box in each.fused.padding:
                matrix[slices(box)] = 0
        return matrices

    def publish(self) -> None:
        """The bucket is filled: the worker may read it."""
        assert self._open is not None, "a bucket is handed over after it was opened"
        slot, placed, views = self._open
        for each, view in zip(placed, views, strict=True):
            self._digests.add(each.name, view)
        self._try(lambda: self._sender.send(slot, placed))

    def end(self) -> None:
        """Wait for the worker to have taken everything in, and compare what it holds with what was sent."""
        held = self._try(self._sender.end)
        self._sender.close()
        sent = self._digests.read()
        if held is None or held == sent:
            return
        both = sent.keys() & held.keys()
        found = {
            "differ": [name for name in sent if name in both and held[name] != sent[name]],
            "are missing": [name for name in sent if name not in both],
            "were not sent": [name for name in held if name not in both],
        }
        what = "; ".join(f"{len(names)} {how}: {_few(names)}" for how, names in found.items() if names)
        raise RolloutError(
            f"{self._sender.receiver} does not hold version {self._version} as it was sent: {what}",
            fix="a fault of the hand-over or of the worker, not of the configuration: what it samples is worth nothing",
        )

    def _try(self, action: Callable[[], T]) -> T | None:
        if self.failure:
            return None
        try:
            return action()
        except RolloutError as error:
            self.failure = str(error)
            self._sender.close()
            return None


def _few(names: Sequence[str]) -> str:
    rest = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(f"`{name}`" for name in names[:_MAX_NAMED]) + rest
