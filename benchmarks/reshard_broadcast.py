"""The method of other trainers for engines on other hosts: gather whole tensors, then broadcast them to the engines.

The ranks of a stage gather one parameter after another. The first of them broadcasts whole Hugging Face tensors, bucket
by bucket: to every rank of the engines, or to one rank on each host, which broadcasts them there. Each rank then cuts
out its worker's part. This is the fastest form of the method: both sides know the content of buckets from tables, one
bucket is gathered while another is broadcast, stages do not wait for each other, and nothing is verified.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.reshard_gather import LoadingStandIn, Parameter, parameters_of
from mrl.models.regions import slices
from mrl.models.table import hf_tensors
from mrl.rounding import round_up
from mrl.weight_sync.ipc import ALIGNMENT_BYTES, IpcSender, SharedBuffer, TensorView
from mrl.weight_sync.planner import ReshardPlanner


@dataclass
class GatheredBucket:
    """Parameters of one stage, and the places of the assembled tensors in a buffer."""

    stage: int
    parameters: list[Parameter]
    placed: dict[str, TensorView]
    num_bytes: int = 0


class BroadcastGroups:
    """Process groups: a sending rank and the engines' ranks, per stage; and the engines' ranks of each host."""

    def __init__(self, planner: ReshardPlanner) -> None:
        mesh, rollout, self.rank = planner.mesh, planner.rollout, dist.get_rank()
        size = mesh.world_size // mesh.pp
        self.sources = [stage * size for stage in range(mesh.pp)]
        on_host = groupby(rollout.hosts, lambda rank: rollout.nodes[rank])
        self._hosts = [(ranks, dist.new_group(ranks)) for _, group in on_host for ranks in [list(group)]]
        leaders = [ranks[0] for ranks, _ in self._hosts]
        self._all = [dist.new_group([source, *rollout.hosts]) for source in self.sources]
        self._leaders = [dist.new_group([source, *leaders]) for source in self.sources]
        blocks = [list(range(first, first + mesh.tp)) for first in range(0, mesh.world_size, mesh.tp)]
        groups = [dist.new_group(block) for block in blocks]
        self.tensor = groups[self.rank // mesh.tp] if self.rank < mesh.world_size else None

    def broadcast(self, stage: int, message: Tensor, once_per_host: bool) -> dist.Work | None:
        """Broadcast from a stage's source to all engine ranks, or to the first of each host; None for other ranks."""
        group = (self._leaders if once_per_host else self._all)[stage]
        if not isinstance(group, dist.ProcessGroup):
            return None
        work: dist.Work | None = dist.broadcast(message, self.sources[stage], group=group, async_op=True)
        return work

    def pass_on(self, message: Tensor) -> dist.Work | None:
        """Broadcast from the first engine rank of this host to the others."""
        ((leader, *_), group), *_ = (host for host in self._hosts if self.rank in host[0])
        work: dist.Work | None = dist.broadcast(message, leader, group=group, async_op=True)
        return work


class GatherAndBroadcast:
    """Part of one rank, of the trainer or of an engine."""

    def __init__(self, planner: ReshardPlanner, channel: Path, num_rounds: int, bucket_bytes: int, dtype: torch.dtype):
        self._groups = BroadcastGroups(planner)
        rank, num_trainers = dist.get_rank(), planner.mesh.world_size
        self._stage, self._is_source = rank // (num_trainers // planner.mesh.pp), rank in self._groups.sources
        self._buckets = buckets_of(planner, bucket_bytes, dtype)
        self._slot_bytes = max(bucket.num_bytes for bucket in self._buckets)
        self._channel, self._stand_in = channel, None
        if rank >= num_trainers:
            position = rank - num_trainers
            self._stand_in = LoadingStandIn(channel, num_rounds, planner, position % planner.rollout.sizes.tp, dtype)
        else:
            self._buffers = torch.empty(2 if self._is_source else 0, self._slot_bytes, dtype=torch.uint8)

    def finished(self) -> dict[str, Tensor]:
        """Return what the worker holds at the end."""
        assert self._stand_in is not None, "trainer ranks have no worker"
        self._stand_in.join()
        return self._stand_in.held

    def run(self, held: Mapping[tuple[int, str], Tensor], once_per_host: bool) -> None:
        """Run one round."""
        if self._stand_in is None:
            self._send(held, once_per_host)
        else:
            self._stand_in.proven = False
            self._receive(once_per_host)

    def _send(self, held: Mapping[tuple[int, str], Tensor], once_per_host: bool) -> None:
        works: list[dist.Work | None] = [None, None]
        for number, bucket in enumerate(bucket for bucket in self._buckets if bucket.stage == self._stage):
            _wait(works[number % 2])
            for parameter, (parts, gathered) in [
                (parameter_to_gather, self._gather(parameter_to_gather, held))
                for parameter_to_gather in bucket.parameters
            ]:
                _wait(gathered)
                for shard, part in zip(parameter.shards, parts, strict=True) if self._is_source else ():
                    for piece in shard.pieces:
                        whole = bucket.placed[piece.hf].view(self._buffers[number % 2])
                        whole[slices(piece.source)] = part[slices(piece.target)]
            if self._is_source:
                message = self._buffers[number % 2, : bucket.num_bytes]
                works[number % 2] = self._groups.broadcast(bucket.stage, message, once_per_host)
        for work in works:
            _wait(work)

    def _gather(
        self, parameter: Parameter, held: Mapping[tuple[int, str], Tensor]
    ) -> tuple[list[Tensor], dist.Work | None]:
        first = parameter.shards[0]
        tensor = held[first.chunk, first.name]
        if len(parameter.shards) == 1:
            return [tensor], None
        parts = [torch.empty_like(tensor) for _ in parameter.shards]
        as_bytes = [part.view(-1).view(torch.uint8) for part in (*parts, tensor)]  # gloo does not know every dtype
        return parts, dist.all_gather(as_bytes[:-1], as_bytes[-1], group=self._groups.tensor, async_op=True)

    def _receive(self, once_per_host: bool) -> None:
        sender = IpcSender(self._channel, self._slot_bytes, torch.device("cpu"))
        sender.begin(1)
        pending: tuple[SharedBuffer, list[TensorView], dist.Work | None] | None = None
        for bucket in self._buckets:
            slot = sender.slot()
            message = slot.buffer[: bucket.num_bytes]
            _wait(self._groups.broadcast(bucket.stage, message, once_per_host))
            passed_on = self._groups.pass_on(message) if once_per_host else None
            _hand_over(sender, pending)
            pending = slot, list(bucket.placed.values()), passed_on
        _hand_over(sender, pending)
        sender.end()
        sender.close()


def buckets_of(planner: ReshardPlanner, limit: int, dtype: torch.dtype) -> list[GatheredBucket]:
    """Return the buckets of the whole model, in stage order."""
    shapes, buckets = hf_tensors(planner.spec, "lm"), list[GatheredBucket]()
    for parameter in parameters_of(planner):
        names = dict.fromkeys(piece.hf for shard in parameter.shards for piece in shard.pieces)
        size = sum(round_up(math.prod(shapes[name]) * dtype.itemsize, ALIGNMENT_BYTES) for name in names)
        if not buckets or buckets[-1].stage != parameter.stage or buckets[-1].num_bytes + size > limit:
            buckets.append(GatheredBucket(parameter.stage, [], {}))
        bucket = buckets[-1]
        bucket.parameters.append(parameter)
        for name in names:
            view = TensorView(name, dtype, tuple(shapes[name]), bucket.num_bytes)
            bucket.placed[name] = view
            bucket.num_bytes = round_up(bucket.num_bytes + view.num_bytes, ALIGNMENT_BYTES)
    return buckets


def _hand_over(sender: IpcSender, filled: tuple[SharedBuffer, Sequence[TensorView], dist.Work | None] | None) -> None:
    if filled is not None:
        _wait(filled[2])
        sender.send(filled[0], filled[1])


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
