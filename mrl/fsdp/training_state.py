"""The state of a sharded engine as a checkpoint has it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

from torch import Tensor
from torch.distributed.tensor import DTensor

from mrl.engine.steps import OwnedState
from mrl.errors import EngineError
from mrl.fsdp.adapters import ShardedAdapters
from mrl.fsdp.optimizer import ShardOptimizer
from mrl.fsdp.parallel import ShardGroups
from mrl.fsdp.weights import HeldRows, ShardedWeights
from mrl.models.regions import Shape
from mrl.models.table import SCORE, Shard


@dataclass(frozen=True)
class ShardState:
    groups: ShardGroups
    weights: ShardedWeights
    adapters: ShardedAdapters | None
    trained: Mapping[str, Tensor]
    """The parameters that learn."""
    trained_by: ShardOptimizer | None

    @property
    def layout(self) -> dict[str, Any]:
        return {"strategy": "fsdp", "world_size": self.groups.mesh.world_size, **asdict(self.groups.parallel)}

    @property
    def lora(self) -> dict[str, Any] | None:
        return None if self.adapters is None else self.adapters.lora.identity

    @property
    def optimizer(self) -> ShardOptimizer:
        if self.trained_by is None:
            raise EngineError("a frozen model has no checkpoint", fix="save the model that is trained")
        return self.trained_by

    def shapes(self) -> dict[str, Shape]:
        if self.adapters is None:
            return dict(self.weights.tensors)
        scores = {name: shape for name, shape in self.weights.tensors.items() if name == SCORE}
        return self.adapters.tensors | scores

    def shards(self) -> Iterator[tuple[Shard, Tensor]]:
        if self.adapters is None:
            yield from self.weights.shards()
            return
        yield from self.adapters.held()
        yield from ((shard, tensor) for shard, tensor in self.weights.shards() if shard.name == SCORE)

    def owned(self, shard: Shard, tensor: Tensor) -> OwnedState:
        held = self._held(shard)
        state = self.optimizer.state_of(held.place.name)
        return OwnedState(0, {kind: held.of(local).flatten() for kind, local in state.items()})

    def set_owned(self, shard: Shard, tensor: Tensor, state: dict[str, Tensor]) -> None:
        held = self._held(shard)
        for kind, local in self.optimizer.state_of(held.place.name).items():
            held.of(local).copy_(state[kind].view(shard.shape))

    def writes(self, shard: Shard) -> bool:
        """Return whether this rank has the first copy of the model."""
        return self.groups.is_first_copy

    def counts(self, shard: Shard) -> bool:
        """Return whether this is the first of all ranks with the same part."""
        return self.writes(shard)

    def gradient(self, shard: Shard, tensor: Tensor) -> Tensor:
        """Return the gradient of the rank's part of a tensor, after it was summed over all ranks."""
        held = self._held(shard)
        return held.of(cast(DTensor, self.trained[held.place.name].grad).to_local())

    def random_trackers(self) -> dict[str, Tensor]:
        return {}

    def set_random_trackers(self, states: dict[str, Tensor]) -> None:
        """Do nothing: all randomness is torch's."""

    def _held(self, shard: Shard) -> HeldRows:
        more = {} if self.adapters is None else self.adapters.rows_of
        return more.get(shard.name) or self.weights.rows_of[shard.name]
