"""The coordinates of each rank in a role's parallel layout, in Megatron's rank order.

Dense layers order the ranks tp (fastest), cp, dp, pp (slowest); expert layers etp, ep, edp, pp. Both cover the same
ranks, so each rank has coordinates in both.
"""

from __future__ import annotations

from dataclasses import dataclass

from mrl.errors import PlacementError


@dataclass(frozen=True)
class Coordinates:
    """Position of one rank on every axis of its role's layout."""

    rank: int
    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int


@dataclass(frozen=True)
class Mesh:
    """Layout of one role over `world_size` ranks. The data-parallel sizes follow from the others."""

    world_size: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1

    def __post_init__(self) -> None:
        for name, size in (
            ("tp x cp x pp", self.tp * self.cp * self.pp),
            ("etp x ep x pp", self.etp * self.ep * self.pp),
        ):
            if self.world_size < size or self.world_size % size:
                raise PlacementError(
                    f"{self.world_size} devices are not a multiple of {name} = {size}",
                    fix=f"give the role {max(1, self.world_size // size) * size} devices, or make {name} smaller",
                )

    @property
    def dp(self) -> int:
        """Return the data-parallel size, the number of shards of a batch."""
        return self.world_size // (self.tp * self.cp * self.pp)

    @property
    def edp(self) -> int:
        return self.world_size // (self.etp * self.ep * self.pp)

    def coordinates(self, rank: int) -> Coordinates:
        return Coordinates(
            rank=rank,
            tp=rank % self.tp,
            cp=rank // self.tp % self.cp,
            dp=rank // (self.tp * self.cp) % self.dp,
            pp=rank // (self.tp * self.cp * self.dp),
            etp=rank % self.etp,
            ep=rank // self.etp % self.ep,
            edp=rank // (self.etp * self.ep) % self.edp,
        )

    def is_output_rank(self, rank: int) -> bool:
        """Return whether `rank` returns the results of its data-parallel shard: it is first in tp and cp on the last
        pipeline stage."""
        at = self.coordinates(rank)
        return at.tp == 0 and at.cp == 0 and at.pp == self.pp - 1
