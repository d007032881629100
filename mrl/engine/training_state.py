"""The state of a Megatron engine as a checkpoint has it."""

from __future__ import annotations

import mrl.engine.with_megatron  # noqa: F401

# isort: split
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from megatron.core import tensor_parallel
from torch import Tensor

from mrl.engine.adapters import Adapters
from mrl.engine.base_digest import is_first_copy
from mrl.engine.groups import ParallelGroups
from mrl.engine.model import TokenModel
from mrl.engine.optimizer import Optimizer
from mrl.engine.steps import OwnedState
from mrl.engine.weights import held_tensors
from mrl.models.regions import Shape
from mrl.models.spec import ModelSpec
from mrl.models.table import SCORE, Head, Shard, hf_tensors


@dataclass(frozen=True)
class MegatronState:
    groups: ParallelGroups
    models: Sequence[TokenModel]
    spec: ModelSpec
    head: Head
    adapters: Adapters | None
    trained_by: Optimizer | None

    @property
    def layout(self) -> dict[str, Any]:
        return {"world_size": self.groups.mesh.world_size, **asdict(self.groups.parallel)}

    @property
    def lora(self) -> dict[str, Any] | None:
        return None if self.adapters is None else self.adapters.lora.identity

    @property
    def optimizer(self) -> Optimizer:
        assert self.trained_by is not None, "only a trained engine has an optimizer"
        return self.trained_by

    def shapes(self) -> dict[str, Shape]:
        if self.adapters is not None:
            return self.adapters.tensors | ({SCORE: (1, self.spec.hidden)} if self.head == "score" else {})
        return hf_tensors(self.spec, self.head)

    def shards(self) -> Iterator[tuple[Shard, Tensor]]:
        held = held_tensors(self.models, self.spec, self.head, self.groups)
        if self.adapters is not None:  # a score head is trained whole
            return chain(self.adapters.held(), ((shard, tensor) for shard, tensor in held if shard.name == SCORE))
        return held

    def owned(self, shard: Shard, tensor: Tensor) -> OwnedState | None:
        return self.optimizer.owned(tensor)

    def set_owned(self, shard: Shard, tensor: Tensor, state: dict[str, Tensor]) -> None:
        self.optimizer.set_owned(tensor, state)

    def writes(self, shard: Shard) -> bool:
        """Return whether this is the first tensor rank and the first stage with the shard."""
        at = self.groups.at
        return is_first_copy(shard, at.etp if shard.expert else at.tp)

    def counts(self, shard: Shard) -> bool:
        """Return whether this is the first of all ranks with the same part."""
        at = self.groups.at
        return self.writes(shard) and (at.edp if shard.expert else at.dp + at.cp) == 0

    def gradient(self, shard: Shard, tensor: Tensor) -> Tensor:
        """Return the gradient of a parameter, in Megatron's buffer."""
        gradient: Tensor = tensor.main_grad  # type: ignore[attr-defined]
        return gradient

    def random_trackers(self) -> dict[str, Tensor]:
        states: dict[str, Tensor] = tensor_parallel.get_cuda_rng_tracker().get_states()
        return states

    def set_random_trackers(self, states: dict[str, Tensor]) -> None:
        tensor_parallel.get_cuda_rng_tracker().set_states(states)
