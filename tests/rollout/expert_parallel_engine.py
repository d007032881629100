"""vLLM's engine with whole experts on each rank, which vLLM's own kernels cannot compute on a CPU.

It also has the two collectives of ranks with data-parallel attention, which vLLM's CPU build does not have.

The kernels take the global number of an expert for one of the rank's own, and read beyond its experts. Here, choices
of other ranks' experts have the weight zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

from mrl.rollout import vllm_engine
from mrl.rollout.engine import EngineFollower, EngineSettings
from mrl.weight_sync import vllm_receiver

_apply = CPUUnquantizedExperts.apply


class ExpertParallelEngine(vllm_engine.VllmEngine):
    def __init__(self, settings: EngineSettings) -> None:
        with _own_worker(settings):
            super().__init__(settings)

    @staticmethod
    def follower(settings: EngineSettings) -> EngineFollower:
        with _own_worker(settings):
            return vllm_engine.VllmEngine.follower(settings)


@contextmanager
def _own_worker(settings: EngineSettings) -> Iterator[None]:
    own = {"worker_extension_cls": f"{__name__}.WorkerExtension"}  # each worker loads this module
    arguments = vllm_engine.engine_arguments(settings) | own
    with mock.patch.object(vllm_engine, "engine_arguments", return_value=arguments):
        yield


class WorkerExtension(vllm_receiver.WorkerExtension):
    """mrl's extension, in a process with the other kernel."""


def _apply_own_experts(self: Any, *, topk_weights: Any, topk_ids: Any, expert_map: Any, **arguments: Any) -> None:
    if expert_map is None:  # another engine of this process, whose ranks have all experts
        _apply(self, topk_weights=topk_weights, topk_ids=topk_ids, expert_map=None, **arguments)
        return
    own_ids = expert_map[topk_ids.long()]
    weights, ids = topk_weights.masked_fill(own_ids < 0, 0.0), own_ids.clamp(min=0).to(topk_ids.dtype)
    _apply(self, topk_weights=weights, topk_ids=ids, expert_map=expert_map, **arguments)


def _all_gatherv(self: Any, tensors: Tensor | list[Tensor], dim: int = 0, sizes: list[int] | None = None) -> Any:
    """Return the tensors of all ranks, one below another. Ranks may have several tokens each."""

    def gathered(own: Tensor) -> Tensor:
        parts = [own.new_empty(size, *own.shape[1:]) for size in sizes or [len(own)] * self.world_size]
        parts[self.rank_in_group].copy_(own)
        for rank, part in enumerate(parts):
            dist.broadcast(part, group=self.device_group, group_src=rank)
        return torch.cat(parts)

    return gathered(tensors) if isinstance(tensors, Tensor) else [gathered(tensor) for tensor in tensors]


def _reduce_scatterv(self: Any, tensor: Tensor, dim: int = -1, sizes: list[int] | None = None) -> Tensor:
    total = tensor.contiguous().clone()
    dist.all_reduce(total, group=self.device_group)
    parts = total.split(sizes or [len(total) // self.world_size] * self.world_size)
    return parts[self.rank_in_group].contiguous()


CPUUnquantizedExperts.apply = _apply_own_experts
CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = _all_gatherv, _reduce_scatterv
