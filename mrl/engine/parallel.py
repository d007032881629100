"""Megatron's process groups for this process, from the configured sizes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from megatron.core import parallel_state, tensor_parallel
from torch.distributed import distributed_c10d

from mrl.config.mesh import Coordinates, Mesh
from mrl.config.schema import ParallelConfig
from mrl.engine import cpu_shim
from mrl.engine.packed_rows import SequenceSharding
from mrl.errors import EngineError


@dataclass(frozen=True)
class ParallelGroups:
    """This rank's place in the layout, and the groups that the engine uses directly."""

    parallel: ParallelConfig
    at: Coordinates
    mesh: Mesh
    device: torch.device
    tp: torch.distributed.ProcessGroup
    cp: torch.distributed.ProcessGroup
    pp: torch.distributed.ProcessGroup
    dp: torch.distributed.ProcessGroup

    @property
    def is_first_stage(self) -> bool:
        return self.at.pp == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank gets the final hidden states."""
        return self.at.pp == self.parallel.pp - 1

    @property
    def sequence_sharding(self) -> SequenceSharding:
        """This rank's part of packed sequences."""
        return SequenceSharding(
            self.parallel.cp, self.at.cp, self.parallel.tp if self.parallel.sequence_parallel else 1
        )


def take_device(local_rank: int) -> str:
    """Make a rank's device current in its process. Return the matching backend of torch.distributed."""
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank % torch.cuda.device_count())  # 0 if each rank sees only one device
        return "nccl"
    torch.set_num_threads(1)  # a rank has one CPU slot
    return "gloo"


@contextmanager
def model_parallel(parallel: ParallelConfig, seed: int) -> Iterator[ParallelGroups]:
    """Create Megatron's groups for the block. torch.distributed must be initialized, without Megatron groups."""
    if not torch.distributed.is_initialized():
        raise EngineError("torch.distributed is not initialized", fix="call init_process_group first")
    if parallel_state.model_parallel_is_initialized():
        raise EngineError("this process already has Megatron groups: only one model layout per process is possible")
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
