"""The engines of a run, and the ranks of the trainer on their devices."""

from __future__ import annotations

from dataclasses import dataclass

from mrl.errors import PlacementError
from mrl.models.rollout_table import EngineSizes
from mrl.models.spec import ModelSpec


@dataclass(frozen=True)
class RolloutLayout:
    """The engines, and the ranks on their devices: trainer ranks, or receivers, numbered after the trainer ranks."""

    sizes: EngineSizes
    hosts: tuple[int, ...]
    """Rank on the device of each worker. Engines follow each other, and their workers are in vLLM's order."""
    nodes: tuple[int, ...]
    """Node of each rank, receivers included."""
    in_step: bool = False
    """All workers of a stage take the layers in the same order, because they compute the scales of FP8 together."""

    @property
    def leaders(self) -> dict[int, int]:
        """Return the rank on the device of a stage's first worker, for the rank of each of its workers."""
        return {host: self.hosts[worker // self.sizes.tp * self.sizes.tp] for worker, host in enumerate(self.hosts)}

    def check(self, spec: ModelSpec, num_trainers: int) -> None:
        """Raise an error if the engines do not fit the model or the devices."""
        self.sizes.check(spec)
        num_ranks = len(self.nodes)
        if num_ranks < num_trainers:
            raise PlacementError(f"{num_ranks} ranks have a node, but there are {num_trainers} trainer ranks")
        if len(self.hosts) % self.sizes.num_workers:
            size = f"tp {self.sizes.tp}" + (f" and pp {self.sizes.pp}" if self.sizes.pp > 1 else "")
            raise PlacementError(f"{len(self.hosts)} workers are not divisible into engines of {size}")
        if len({*self.hosts}) < len(self.hosts) or not {*self.hosts} <= {*range(num_ranks)}:
            raise PlacementError(
                f"workers are on the devices of ranks {list(self.hosts)}: each needs its own of the {num_ranks} ranks"
            )
