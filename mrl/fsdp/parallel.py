"""Process groups of a sharded model: ranks with different rows, ranks that share a row, ranks that share a copy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mrl.config.mesh import Mesh
from mrl.config.schema import ParallelConfig
from mrl.engine.groups import ParallelGroups
from mrl.errors import EngineError


@dataclass(frozen=True)
class ShardGroups(ParallelGroups):
    """This rank's place in the layout. `tp` and `pp` are groups of this rank alone."""

    shards: DeviceMesh
    """The ranks over which `fully_shard` splits every parameter. With copies, its first axis is the copies."""
    shard: dist.ProcessGroup
    """The ranks that share one copy of the model."""

    @property
    def is_first_copy(self) -> bool:
        return self.at.rank < self.shard.size()


@contextmanager
def shard_groups(parallel: ParallelConfig, shard_size: int | None, seed: int) -> Iterator[ShardGroups]:
    """Create the groups for the block. torch.distributed must be initialized. `shard_size` None means all ranks."""
    if not dist.is_initialized():
        raise EngineError("torch.distributed is not initialized", fix="call init_process_group first")
    on_gpu = torch.cuda.is_available()
    world, kind = dist.get_world_size(), "cuda" if on_gpu else "cpu"
    mesh, size = Mesh(world, cp=parallel.cp), shard_size or world
    if world % size:
        raise EngineError(f"{world} ranks are not a multiple of fsdp.shard_size = {size}", fix="choose a divisor")
    before = set(distributed_c10d._world.pg_map)
    rows = init_device_mesh(kind, (mesh.dp, mesh.cp, 1), mesh_dim_names=("dp", "cp", "one"))
    if size == world:
        shards = init_device_mesh(kind, (world,), mesh_dim_names=("shard",))
    else:
        shards = init_device_mesh(kind, (world // size, size), mesh_dim_names=("copy", "shard"))
    torch.manual_seed(seed)
    try:
        yield ShardGroups(
            parallel=parallel,
            at=mesh.coordinates(dist.get_rank()),
            mesh=mesh,
            device=torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu"),
            tp=rows.get_group("one"),
            etp=rows.get_group("one"),
            cp=rows.get_group("cp"),
            pp=rows.get_group("one"),
            dp=rows.get_group("dp"),
            shards=shards,
            shard=shards.get_group("shard"),
        )
    finally:
        for group in [group for group in reversed(distributed_c10d._world.pg_map) if group not in before]:
            dist.destroy_process_group(group)
