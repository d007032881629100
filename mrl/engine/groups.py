"""A rank's place in its role's layout, with its device and its process groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mrl.config.mesh import Coordinates, Mesh
from mrl.config.schema import ParallelConfig
from mrl.engine.packed_rows import SequenceSharding


@dataclass(frozen=True)
class ParallelGroups:
    """This rank's place in the layout, and the groups that the engine uses directly."""

    parallel: ParallelConfig
    at: Coordinates
    mesh: Mesh
    device: torch.device
    tp: torch.distributed.ProcessGroup
    etp: torch.distributed.ProcessGroup
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
