"""The critic's calls to workers that are the actor's too."""

from __future__ import annotations

from typing import Any

from mrl.config.mesh import Mesh
from mrl.controller import RayWorkerGroup
from mrl.workers.messages import CRITIC_PREFIX


class CriticOfActor:
    """The methods of a critic's group, on the actor's workers. The actor's group starts and ends them."""

    role = "critic"

    def __init__(self, actor: RayWorkerGroup) -> None:
        self._actor = actor

    @property
    def mesh(self) -> Mesh:
        return self._actor.mesh

    def __getattr__(self, name: str) -> Any:
        return getattr(self._actor, CRITIC_PREFIX + name)

    def shutdown(self) -> None:
        """Do nothing: the workers end with the actor's group."""
