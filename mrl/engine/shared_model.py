"""One frozen model for two trained roles in the same processes: the actor, and a critic.

Each role has adapters, a head, gradient buffers and an optimizer. One role computes at a time: its adapters are applied
and its head is used, and those of the other are not.
"""

from __future__ import annotations

import mrl.engine.with_megatron  # noqa: F401

# isort: split
from typing import Any, Protocol

from mrl.engine.adapters import Adapters
from mrl.engine.model import TokenModel
from mrl.engine.offload import DeviceMemory
from mrl.engine.optimizer import Optimizer
from mrl.engine.parallel import ParallelGroups


class AdaptedEngine(Protocol):
    """The parts of a `MegatronEngine` that two roles share, or have each."""

    request: Any
    groups: ParallelGroups
    config: Any
    models: list[TokenModel]
    memory: DeviceMemory
    adapters: Adapters | None
    optimizer: Optimizer | None
    shared: SharedModel | None


class SharedModel:
    """The engines on the model that the first of them has loaded."""

    def __init__(self, first: AdaptedEngine) -> None:
        assert first.adapters is not None, "only a frozen model can be shared"
        self.first = first
        self._engines = [first]
        first.shared = self

    def join(self, engine: AdaptedEngine) -> None:
        """Add a role, whose head gives scores. Its optimizer must be made before anything is computed."""
        self._engines.append(engine)
        if self.first.models[-1].post_process:
            self.first.models[-1].add_score_head(engine.groups.device)

    def all_learn(self) -> None:
        """Let gradients reach the adapters of every role again: making an optimizer needs those of one role only."""
        for engine in self._engines:
            assert engine.optimizer is not None, "every role of a shared model is trained"
            for buffer in engine.optimizer.buffers:
                for parameter in buffer.params:
                    parameter.requires_grad_(True)

    def select(self, engine: AdaptedEngine) -> None:
        """Compute with this role from now on."""
        for model in self.first.models:
            model.head = engine.request.head
        for other in self._engines:
            assert other.adapters is not None, "every role of a shared model has adapters"
            other.adapters.is_selected = other is engine
        if engine.optimizer is not None:
            engine.optimizer.select()
