"""Turns of roles on shared devices: a role releases its cached memory at the end of its turn.

Allocators cache freed memory for their own process. This saves time between passes of one role, but keeps the memory
from the other roles' processes.
"""

from __future__ import annotations

from mrl.config.schema import Config
from mrl.controller import RayWorkerGroup


class DeviceTurns:
    """The role that computed last in each place: a pool or, on CPUs, the machine.

    Roles take turns from one thread. Calls from other threads do not take part.
    """

    def __init__(self, config: Config) -> None:
        pools, on_cpu = config.placement.roles, config.cluster.device == "cpu"
        shared = [role for role in pools if on_cpu or list(pools.values()).count(pools[role]) > 1]
        self._places = {role: "" if on_cpu else pools[role] for role in shared}
        self._last: dict[str, RayWorkerGroup] = {}

    def shares(self, role: str) -> bool:
        """Return whether processes of other roles use the memory of this role's devices between its turns."""
        return role in self._places

    def begin(self, group: RayWorkerGroup) -> None:
        """Begin a role's turn. The previous role in the same place releases its cached memory."""
        if (place := self._places.get(group.role)) is None:
            return
        last = self._last.get(place)
        if last is not None and last is not group:
            last.give_back()
        self._last[place] = group

    def end(self) -> None:
        """End all turns, before the engines or the driver continue."""
        while self._last:
            _, group = self._last.popitem()
            group.give_back()
