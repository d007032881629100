"""Whose turn it is on devices that several roles share: a role gives back cached memory when its turn ends.

Allocators keep freed memory for their own process. Between passes of one role that saves time; another role's process
cannot have this memory.
"""

from __future__ import annotations

from mrl.config.schema import Config
from mrl.controller import RayWorkerGroup


class DeviceTurns:
    """The last role that computed at each place. Roles take turns from one thread; what computes in another does not
    take part. Places are pools, and on CPUs the memory of the machine, which all have in common."""

    def __init__(self, config: Config) -> None:
        pools, on_cpu = config.placement.roles, config.cluster.device == "cpu"
        shared = [role for role in pools if on_cpu or list(pools.values()).count(pools[role]) > 1]
        self._places = {role: "" if on_cpu else pools[role] for role in shared}
        self._last: dict[str, RayWorkerGroup] = {}

    def shares(self, role: str) -> bool:
        """Return whether other processes work with the memory of this role's devices between its turns."""
        return role in self._places

    def begin(self, group: RayWorkerGroup) -> None:
        """Have a role compute; the one before it at the same place gives back what it keeps."""
        if (place := self._places.get(group.role)) is None:
            return
        last = self._last.get(place)
        if last is not None and last is not group:
            last.give_back()
        self._last[place] = group

    def end(self) -> None:
        """End all turns: engines or the driver go on."""
        while self._last:
            _, group = self._last.popitem()
            group.give_back()
