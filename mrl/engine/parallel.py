"""Megatron's process groups for this process, from the configured sizes."""

from __future__ import annotations

import mrl.engine.with_megatron  # noqa: F401

# isort: split
import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from megatron.core import parallel_state, tensor_parallel
from torch.distributed import distributed_c10d

from mrl.config.mesh import Mesh
from mrl.config.schema import ParallelConfig
from mrl.engine import cpu_shim
from mrl.engine.groups import ParallelGroups, take_device
from mrl.errors import EngineError

__all__ = ["ParallelGroups", "model_parallel", "take_device"]


@contextmanager
def model_parallel(parallel: ParallelConfig, seed: int) -> Iterator[ParallelGroups]:
    """Create Megatron's groups for the block. torch.distributed must be initialized, without Megatron groups."""
    if not torch.distributed.is_initialized():
        raise EngineError("torch.distributed is not initialized", fix="call init_process_group first")
    if parallel_state.model_parallel_is_initialized():
        raise EngineError("this process already has Megatron groups: only one model layout per process is possible")
    # An earlier engine is in reference cycles. Until Python collects it, its destroyed groups keep their threads.
    gc.collect()
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        cpu_shim.install()
    groups_before = set(distributed_c10d._world.pg_map)
    mesh = Mesh(torch.distributed.get_world_size(), parallel.tp, parallel.cp, parallel.pp, parallel.ep, parallel.etp)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
        create_gloo_process_groups=False,  # only Megatron's own checkpoints use them
    )
    try:
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        yield ParallelGroups(
            parallel=parallel,
            at=mesh.coordinates(torch.distributed.get_rank()),
            mesh=mesh,
            device=torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu"),
            tp=parallel_state.get_tensor_model_parallel_group(),
            etp=parallel_state.get_expert_tensor_parallel_group(),
            cp=parallel_state.get_context_parallel_group(),
            pp=parallel_state.get_pipeline_model_parallel_group(),
            dp=parallel_state.get_data_parallel_group(),
        )
    finally:
        parallel_state.destroy_model_parallel()
        # Megatron only drops its references; each group has threads that would poll forever. On every rank, the newest
        # group goes first: ending a group of NCCL may wait for the other ranks.
        for group in [group for group in reversed(distributed_c10d._world.pg_map) if group not in groups_before]:
            torch.distributed.destroy_process_group(group)
