"""The method of other trainers, for comparison: every rank gathers every tensor of the model and cuts out its part.

Each parameter is broadcast over the pipeline stages, gathered over the tensor ranks (over the expert ranks for an
expert), assembled into Hugging Face tensors, handed over in buckets, and cut there into the worker's parts. This is the
fastest form of the method: tables are looked up before the clock starts, and two buckets alternate. With `proven` both
ends compute digests of the tensors, as `mrl.weight_sync` does; other trainers do not verify the result.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.models.layout import RankPlace
from mrl.models.regions import Region, slices
from mrl.models.rollout_table import rollout_tensors
from mrl.models.table import Shard, hf_tensors, shards_of
from mrl.weight_sync.digest import Digests
from mrl.weight_sync.ipc import ALIGNMENT_BYTES, IpcReceiver, IpcSender, TensorView
from mrl.weight_sync.planner import ReshardPlanner


@dataclass(frozen=True)
class Parameter:
    """One parameter of one stage, in the shards of the ranks that split it."""

    stage: int
    shards: list[Shard]
    """One shard of each rank in the gathered group."""


class GatherEverything:
    """Gathers the whole model on every rank, tensor by tensor."""

    def __init__(self, planner: ReshardPlanner, channel: Path, num_rounds: int, bucket_bytes: int) -> None:
        mesh, rank = planner.mesh, dist.get_rank()
        size = mesh.world_size // mesh.pp
        self._stage = rank // size
        self._sources = [rank % size + stage * size for stage in range(mesh.pp)]
        self._pipeline = _own_group(rank, [list(range(first, mesh.world_size, size)) for first in range(size)])
        self._tensor = _own_group(rank, _blocks(mesh.world_size, mesh.tp))
        self._expert = _own_group(rank, _blocks(mesh.world_size, mesh.ep * mesh.etp))
        self._parameters = parameters_of(planner)
        self._shapes = hf_tensors(planner.spec, "lm")
        self._slot_bytes = max(bucket_bytes, 4 * max(map(math.prod, self._shapes.values())) + ALIGNMENT_BYTES)
        self._channel = channel
        self._stand_in = LoadingStandIn(channel, num_rounds, planner, rank % planner.rollout.sizes.tp)
        self.bytes_received = 0
        """Bytes received in the last round."""

    def finished(self) -> dict[str, Tensor]:
        """Return what the worker holds at the end."""
        self._stand_in.join()
        return self._stand_in.held

    def run(self, held: dict[tuple[int, str], Tensor], proven: bool) -> None:
        """Run one round."""
        self.bytes_received = 0
        self._stand_in.proven = proven
        digests = Digests()
        sender = IpcSender(self._channel, self._slot_bytes, torch.device("cpu"))
        sender.begin(1)
        slot, end = sender.slot(), 0
        views: list[TensorView] = []
        for parameter in self._parameters:
            parts = self._gather(parameter, held)
            for name, tensor in self._whole(parameter, parts).items():
                if end + tensor.nbytes > self._slot_bytes:
                    sender.send(slot, views)
                    slot, views, end = sender.slot(), [], 0
                views.append(TensorView(name, tensor.dtype, tuple(tensor.shape), end))
                views[-1].view(slot.buffer).copy_(tensor)
                if proven:
                    digests.add(name, tensor)
                end += -(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        sender.send(slot, views)
        held_digests = sender.end()
        sender.close()
        assert held_digests == digests.read(), "the worker has other weights than were sent"

    def _gather(self, parameter: Parameter, held: dict[tuple[int, str], Tensor]) -> list[Tensor]:
        first = parameter.shards[0]
        tensor = torch.empty(first.shape, dtype=next(iter(held.values())).dtype)
        if parameter.stage == self._stage:
            tensor.copy_(held[first.chunk, first.name])
        if len(self._sources) > 1:
            dist.broadcast(tensor, self._sources[parameter.stage], group=self._pipeline)
            self.bytes_received += tensor.nbytes if parameter.stage != self._stage else 0
        parts = [tensor]
        if len(parameter.shards) > 1:
            parts = [torch.empty_like(tensor) for _ in parameter.shards]
            dist.all_gather(parts, tensor, group=self._expert if first.expert else self._tensor)
            self.bytes_received += tensor.nbytes * (len(parts) - 1)
        return parts

    def _whole(self, parameter: Parameter, parts: list[Tensor]) -> dict[str, Tensor]:
        whole: dict[str, Tensor] = {}
        for shard, part in zip(parameter.shards, parts, strict=True):
            for piece in shard.pieces:
                if piece.hf not in whole:
                    whole[piece.hf] = torch.empty(self._shapes[piece.hf], dtype=part.dtype)
                whole[piece.hf][slices(piece.source)] = part[slices(piece.target)]
        return whole


class LoadingStandIn(threading.Thread):
    """A worker that cuts its parameters out of whole tensors, like vLLM's loaders."""

    def __init__(
        self, path: Path, num_rounds: int, planner: ReshardPlanner, tp_rank: int, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(daemon=True)
        self._receiver, self._num_rounds = IpcReceiver(path), num_rounds
        self.proven = True
        fused = rollout_tensors(planner.spec, planner.rollout.sizes, tp_rank)
        self.held = {tensor_spec.name: torch.zeros(tensor_spec.shape, dtype=dtype) for tensor_spec in fused}
        self._cuts: dict[str, list[tuple[str, Region, Region]]] = {}
        for tensor_spec in fused:
            for piece in tensor_spec.pieces:
                self._cuts.setdefault(piece.hf, []).append((tensor_spec.name, piece.source, piece.target))
        self.start()

    def run(self) -> None:
        """Receive every round."""
        for _ in range(self._num_rounds):
            digests = Digests()
            for bucket in self._receiver.buckets():
                for name, tensor in bucket.tensors.items():
                    for fused, source, target in self._cuts.get(name, ()):
                        parameter = self.held[fused]
                        matrix = parameter.view(-1, parameter.shape[-1]) if parameter.ndim > 1 else parameter
                        matrix[slices(target)] = tensor[slices(source)]
                    if self.proven:
                        digests.add(name, tensor)
            self._receiver.reply(digests.read())
        self._receiver.close()


def parameters_of(planner: ReshardPlanner) -> list[Parameter]:
    """Return every parameter of the model, in the same order on all ranks."""
    mesh, parameters = planner.mesh, []
    for stage in range(mesh.pp):
        dense = [
            [s for s in shards_of(planner.spec, planner.layout, RankPlace(tp, stage), "lm") if not s.expert]
            for tp in range(mesh.tp)
        ]
        experts = [
            [s for s in shards_of(planner.spec, planner.layout, RankPlace(0, stage, ep, etp), "lm") if s.expert]
            for ep in range(mesh.ep)
            for etp in range(mesh.etp)
        ]
        for ranks in (dense, experts):
            parameters += [Parameter(stage, _split(list(shards))) for shards in zip(*ranks, strict=True)]
    return parameters


def _split(shards: list[Shard]) -> list[Shard]:
    """Return the shards that make up the parameter: only one if all ranks have the same."""
    return shards if shards[0].split else shards[:1]


def _blocks(num_ranks: int, size: int) -> list[list[int]]:
    return [list(range(first, first + size)) for first in range(0, num_ranks, size)]


def _own_group(rank: int, groups: list[list[int]]) -> dist.ProcessGroup:
    all_groups = [(ranks, dist.new_group(ranks)) for ranks in groups]
    (own,) = (group for ranks, group in all_groups if rank in ranks)
    assert isinstance(own, dist.ProcessGroup), "each rank is in one group of each kind"
    return own
