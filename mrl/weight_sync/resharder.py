"""Execution of a plan: move weights from Megatron's shards to the rollout workers on the same devices, and check them.

Every rank fills buckets with the fused tensors of the worker on its device, from its own parameters and from messages.
The worker reads a full bucket while the next one is filled. No full tensor is ever assembled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.controller import Rendezvous
from mrl.dtypes import ITEM_BYTES, torch_dtype
from mrl.errors import EngineError, RolloutError
from mrl.models.regions import slices
from mrl.models.rollout_table import Fused
from mrl.spans import SPANS
from mrl.weight_sync.digest import Digests
from mrl.weight_sync.exchange import (
    Held,
    JoinedTransport,
    P2PTransport,
    WeightExchange,
    WorldTransport,
    message_schedule,
)
from mrl.weight_sync.fp8 import Fp8Source
from mrl.weight_sync.ipc import ALIGNMENT_BYTES, NUM_SLOTS, IpcSender, SharedBuffer, TensorView
from mrl.weight_sync.planner import BucketSizes, PlannedBucket, ReshardPlanner
from mrl.weight_sync.rollout_layout import RolloutLayout

T = TypeVar("T")

_SLOT_SHARE = 0.75
"""Share of the memory for two buckets. The rest is for messages: two send buffers and two receive buffers."""
_MESSAGE_SHARE = (1 - _SLOT_SHARE) / 2
_MAX_NAMED = 8


@dataclass(frozen=True)
class WeightSyncSpec:
    """Parameters of a transfer that all participating ranks share: engines, number formats, limits and rendezvous."""

    layout: RolloutLayout
    sockets: tuple[Path, ...]
    """Socket of each engine worker."""
    dtype: str
    """Dtype of the engines' parameters."""
    trained_dtype: str
    """Dtype of the trainer's parameters."""
    bucket_bytes: int = 256 << 20
    """Twice this size, or twice the largest tensor if that is larger, is the extra memory per device."""
    worker_timeout_s: float = 120.0
    """Longest time that an engine worker may take for a bucket."""
    timeout_s: float = 120.0
    """Longest time that a rank waits for other ranks."""
    rendezvous: Rendezvous | None = None
    """Meeting point of trainer ranks and receivers; None if the engines are on the trainer's devices."""

    shard_size: int | None = None
    """Number of trainer ranks that share one copy of a model that torch shards; None if Megatron runs it."""

    adapters: Path | None = None
    """Directory for the adapters of each version, which engines read; None if engines get merged weights."""

    def transport(self, rank: int, device: torch.device) -> P2PTransport:
        """Join the other ranks."""
        if self.rendezvous is None:
            return WorldTransport(device)
        size = len(self.layout.nodes)
        return JoinedTransport(self.rendezvous.store(self.timeout_s), rank, size, device, self.timeout_s)


@dataclass(frozen=True)
class ReshardReport:
    """Counts of one rank for one version, measured during the transfer."""

    version: int
    worker: int | None
    """The worker on this rank's device, if it took part."""
    bytes_sent: int
    bytes_received: int
    least_bytes: int
    """Smallest possible number of received bytes: the worker needs them, and this rank does not hold them."""
    num_transfers: int
    """Number of messages sent."""
    num_buckets: int
    extra_bytes: int
    """Memory used for the transfer in addition to the parameters."""
    seconds: float
    failure: str
    """Reason why the worker did not get the weights, if so. Other workers have got them."""
    moved: float = 0.0
    """Sum of the sizes of the updates that adapters make to this rank's weights."""
    lost: float = 0.0
    """The part of `moved` that rounding the merged weights removes."""
    adapters: str = ""
    """Digest of the adapters that this rank wrote for the engines."""
    adapter_bytes: int = 0
    """Size of their file."""
    delivered_bytes: int = 0
    """Size of the tensors that the worker took."""


class Resharder:
    """Sends each version by a plan computed once. Create it, and call `send`, on all ranks together."""

    def __init__(
        self,
        planner: ReshardPlanner,
        transport: P2PTransport,
        held: Held,
        spec: WeightSyncSpec,
        column_groups: Sequence[dist.ProcessGroup] = (),
    ) -> None:
        """For engines in FP8, take the groups of ranks that split columns of dense weights, and those of experts."""
        self.planner, self._held, self._spec, self._transport = planner, held, spec, transport
        for shard in planner.shards(transport.rank):
            expected = torch_dtype(shard.dtype or spec.trained_dtype)
            if (dtype := held[shard.chunk, shard.name].dtype) != expected:
                raise EngineError(f"`{shard.name}` of the trainer should be {expected}, but it is {dtype}")
        self._dtype = torch_dtype(spec.dtype)
        self._quantized = None
        if planner.rollout.sizes.fp8 is not None:
            self._quantized = Fp8Source(planner, transport.rank, held, self._dtype, column_groups)
        self._slot_bytes = max(int(spec.bucket_bytes * _SLOT_SHARE), planner.largest_bytes(spec.dtype))
        sizes = BucketSizes(self._slot_bytes, spec.dtype, spec.trained_dtype, ALIGNMENT_BYTES)
        self.plan = planner.plan(transport.rank, sizes)
        least = planner.least_received(transport.rank)
        assert self.plan.num_received() == least, f"the plan moves {self.plan.num_received()} elements for {least}"
        self._least_bytes = self.plan.bytes_received()
        self._limit_bytes = int(self._slot_bytes * _MESSAGE_SHARE / _SLOT_SHARE) // 4 * 4
        self._steps = [
            message_schedule(self.plan, bucket, self._limit_bytes // ITEM_BYTES[bucket.dtype])
            for bucket in self.plan.buckets
        ]
        # NCCL connects a group in its first call, which needs every rank. A step involves only a few.
        transport.barrier()

    @torch.no_grad()
    def send(self, version: int, workers: Collection[int] | None = None) -> ReshardReport:
        """Bring all workers, or the given ones, to this version. All ranks must name the same workers.

        Raise an error if a worker's weights differ from the weights sent. If a worker has died, report it instead: it
        will be replaced, and the trainer ranks can continue.
        """
        with SPANS("transfer", version=version) as facts:
            report = self._send(version, workers)
            facts |= {"bytes_to_engine": report.delivered_bytes}
            facts |= {"bytes_sent": report.bytes_sent, "bytes_received": report.bytes_received}
        return report

    def _send(self, version: int, workers: Collection[int] | None) -> ReshardReport:
        began = time.perf_counter()
        plan = self.plan
        receiving_ranks = {host for host, worker in plan.worker_of.items() if workers is None or worker in workers}
        if self._quantized is not None:
            self._quantized.measure()
        exchange = WeightExchange(self._held, self._transport, self._limit_bytes, self._quantized)
        delivery = self._delivery(version) if plan.rank in receiving_ranks else None
        for bucket, planned in zip(plan.buckets, self._steps, strict=True):
            matrices = delivery.open(bucket) if delivery else None
            if matrices is not None:
                exchange.copy_local(bucket.incoming.get(plan.rank, ()), matrices)
            exchange.run(planned, receiving_ranks, matrices, torch_dtype(bucket.dtype))
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
            extra_bytes=exchange.extra_bytes
            + (self._quantized.num_bytes if self._quantized else 0)
            + (NUM_SLOTS * self._slot_bytes if delivery else 0),
            seconds=time.perf_counter() - began,
            failure=delivery.failure if delivery else "",
            delivered_bytes=delivery.num_bytes if delivery else 0,
        )

    def _delivery(self, version: int) -> EngineTransfer:
        assert self.plan.worker is not None, "a rank without a worker receives nothing"
        path, device = self._spec.sockets[self.plan.worker], self._transport.device
        sender = IpcSender(path, self._slot_bytes, device, self._spec.worker_timeout_s)
        return EngineTransfer(sender, version, self._dtype)


class EngineTransfer:
    """Transfer of one weight version to one worker. If the worker fails, stop and keep the reason."""

    def __init__(self, sender: IpcSender, version: int, dtype: torch.dtype) -> None:
        self._sender, self._version, self._dtype = sender, version, dtype
        self._digests = Digests()
        self._open: tuple[SharedBuffer, list[TensorView], list[Tensor]] | None = None
        self.failure, self.num_bytes = "", 0
        self._try(lambda: sender.begin(version))

    def open(self, bucket: PlannedBucket) -> list[Tensor] | None:
        """Return the tensors of a bucket as matrices to fill, with their padding set; None if they are not needed."""
        slot = self._try(self._sender.slot) if bucket.tensors else None
        if slot is None:
            return None
        layout = [
            TensorView(tensor.name, self._dtype_of(tensor.fused), tensor.fused.shape, tensor.offset)
            for tensor in bucket.tensors
        ]
        views = [tensor.view(slot.buffer) for tensor in layout]
        self._open = slot, layout, views
        matrices = [view.view(tensor.fused.place) for view, tensor in zip(views, bucket.tensors, strict=True)]
        for matrix, tensor in zip(matrices, bucket.tensors, strict=True):
            for box in tensor.fused.padding:
                matrix[slices(box)] = 0
        return matrices

    def publish(self) -> None:
        """Hand the filled bucket to the worker."""
        assert self._open is not None, "a bucket must be opened before it is published"
        slot, layout, views = self._open
        for tensor, view in zip(layout, views, strict=True):
            self._digests.add(tensor.name, view)
            self.num_bytes += view.nbytes
        self._try(lambda: self._sender.send(slot, layout))

    def end(self) -> None:
        """Wait until the worker has loaded everything, and compare its digests with those of the sent weights."""
        received = self._try(self._sender.end)
        self._sender.close()
        sent = self._digests.read()
        if received is None or received == sent:
            return
        common = sent.keys() & received.keys()
        differences = {
            "differ": [name for name in sent if name in common and received[name] != sent[name]],
            "are missing": [name for name in sent if name not in common],
            "were not sent": [name for name in received if name not in common],
        }
        summary = "; ".join(f"{len(names)} {problem}: {_few(names)}" for problem, names in differences.items() if names)
        raise RolloutError(
            f"{self._sender.receiver} does not hold version {self._version} as it was sent: {summary}",
            fix="this is a bug in the transfer or in the worker, not in the configuration; discard its samples",
        )

    def _dtype_of(self, fused: Fused) -> torch.dtype:
        return torch_dtype(fused.dtype) if fused.dtype else self._dtype

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
    suffix = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(f"`{name}`" for name in names[:_MAX_NAMED]) + suffix
