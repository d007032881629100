"""FsdpEngine: one model of transformers, sharded by torch, on this rank. It has the methods of `MegatronEngine`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrl.config.schema import MegatronModelConfig, TrainedModelConfig
from mrl.data.packing import PackingRules, RowCost
from mrl.dtypes import torch_dtype
from mrl.engine.fp8_base import WeightsToSend
from mrl.engine.offload import DeviceMemory
from mrl.engine.packed_rows import Lengths, MicroBatch, TokenRows, pack
from mrl.engine.scores import LossFunction, LossInput, ScoreRequest, Scores, merged
from mrl.engine.steps import OwnedState, StepOutcome
from mrl.errors import EngineError
from mrl.fsdp.model import Build, RowModel, build
from mrl.fsdp.optimizer import ShardOptimizer
from mrl.fsdp.parallel import ShardGroups
from mrl.fsdp.probe import check_packing
from mrl.fsdp.weights import ShardedWeights
from mrl.models.hf_reader import HfReader
from mrl.models.regions import Shape
from mrl.models.spec import ModelSpec
from mrl.models.table import Head, Shard, hf_tensors
from mrl.spans import SPANS
from mrl.weight_sync.row_planner import untrained_tensors


@dataclass(frozen=True)
class FsdpRequest:
    """A model, its head and its settings. Settings of the type `TrainedModelConfig` make it trainable."""

    spec: ModelSpec
    head: Head
    settings: MegatronModelConfig
    new_head: bool = False
    """Whether a score head that is missing in the files starts at zero."""


class FsdpEngine:
    """A model on this rank.

    Call each method on all ranks of the layout, with this rank's data-parallel shard of rows.
    """

    adapters = None
    expert_load = None
    router_replay = None
    memory: DeviceMemory
    """Memory of the model on the device; set by `load`."""
    source: str
    """Directory that the weights came from; set by `load`."""
    model: RowModel
    weights: ShardedWeights

    def __init__(self, request: FsdpRequest, groups: ShardGroups) -> None:
        self.request, self.groups = request, groups
        self.optimizer: ShardOptimizer | None = None
        self.watch: Callable[[], AbstractContextManager[None]] | None = None
        """Context of the passes of an update while a step is recorded."""

    @property
    def models(self) -> list[RowModel]:
        return [self.model]

    @property
    def training_state(self) -> ShardState:
        return ShardState(self)

    @property
    def packing(self) -> PackingRules:
        """Packing rules for micro-batches of this model in this layout."""
        spec, cut = self.request.spec, self.groups.sequence_sharding
        pair = spec.attention_flops_per_token_pair
        return PackingRules(
            RowCost(spec.flops_per_token + pair / 2, pair / 2),
            row_multiple=cut.row_multiple,
            pack_multiple=cut.pack_multiple,
            count_multiple=1,
            context_size=self.groups.parallel.cp,
        )

    def load(self, reader: HfReader) -> None:
        """Build the model, read the weights, check that it takes packed rows, and set up training if asked for."""
        request, self.source, settings = self.request, str(reader.path), self.request.settings
        reader.check(request.spec, request.head, request.new_head)
        compute = torch_dtype(settings.dtype)
        is_trained = isinstance(settings, TrainedModelConfig)
        stored = torch.float32 if is_trained else compute
        order = Build(Path(reader.path), request.head, compute, stored, settings.fsdp.recompute)
        self.model = build(order, self.groups)
        shard = self.groups.shard
        tensors = hf_tensors(request.spec, request.head)
        self.weights = ShardedWeights(self.model, tensors, shard.rank(), shard.size())
        self.weights.check_table(untrained_tensors(request.spec))
        self.weights.load(reader)
        check_packing(self.model, self.groups, compute)
        parameters = [self.weights.local(name) for name in self.weights.parameters]
        held: dict[str, list[Tensor]] = {"parameters": parameters}
        if isinstance(settings, TrainedModelConfig):
            self.optimizer = ShardOptimizer(self.weights.parameters, self.weights.decayed(), settings, shard)
            held |= {"gradients": [], "optimizer": []}
        else:
            self.model.requires_grad_(False)
        states = None if self.optimizer is None else self.optimizer.state_tensors
        self.memory = DeviceMemory(held, self.groups.device, states)

    def held_tensors(self) -> Iterator[tuple[Shard, Tensor]]:
        """Yield the parts of the model's tensors that this rank holds."""
        return self.weights.shards()

    def weights_to_send(self) -> WeightsToSend:
        return WeightsToSend({(shard.chunk, shard.name): tensor for shard, tensor in self.held_tensors()})

    def base_digest(self) -> str:
        """Return an empty string: there are no adapters."""
        return ""

    @torch.no_grad()
    def forward(self, rows: TokenRows, micro_batches: Sequence[Lengths], scores: ScoreRequest) -> Scores:
        """Return the scores of all response tokens in row order."""
        self.memory.need("parameters")
        outputs = [Scores(**self.model(batch, scores)) for batch in self._pack(rows, micro_batches)]
        self.model.reshard()  # type: ignore[operator]  # otherwise torch keeps the root's parameters whole
        return merged(outputs, micro_batches, rows.response_lengths)

    def forward_backward(
        self, rows: TokenRows, micro_batches: Sequence[Lengths], loss: LossFunction, scores: ScoreRequest
    ) -> dict[str, float]:
        """Accumulate gradients of the loss. Return metrics summed over this shard's rows."""
        self.memory.need("parameters", "gradients")
        reports = [self._backward(batch, loss, scores) for batch in self._pack(rows, micro_batches)]
        names = reports[0] if reports else {}
        return {name: float(sum(float(report[name]) for report in reports)) for name in names}

    def other_experts(self) -> dict[str, float]:
        """Return nothing: this strategy replays no routes."""
        return {}

    def update(
        self, rows: TokenRows, micro_batches: Sequence[Lengths], loss: LossFunction, scores: ScoreRequest
    ) -> tuple[dict[str, float], StepOutcome]:
        self.memory.check("parameters", "gradients", "optimizer")
        assert self.optimizer is not None, "only a trained engine has an optimizer"
        self.optimizer.zero_grad()
        watched = nullcontext() if self.watch is None else self.watch()
        with watched, SPANS("forward_backward", micro_batches=len(micro_batches)):
            reports = self.forward_backward(rows, micro_batches, loss, scores)
        self.memory.need("optimizer")
        with SPANS("optimizer"):
            outcome = self.optimizer.step()
        if outcome.applied:
            self.memory.changed()
        return reports, outcome

    def _backward(self, batch: MicroBatch, loss: LossFunction, scores: ScoreRequest) -> dict[str, Tensor]:
        columns = {name: column.to(self.groups.device) for name, column in batch.rows.columns.items()}
        found = Scores(**self.model(batch, scores))
        output = loss(LossInput(found, batch.rows.response_lengths, columns))
        output.loss.backward()  # type: ignore[no-untyped-call]
        return dict(output.reports)

    def _pack(self, rows: TokenRows, micro_batches: Sequence[Lengths]) -> Iterator[MicroBatch]:
        for index in micro_batches:
            yield pack(rows.take(index), self.groups.sequence_sharding, self.groups.device)


class ShardState:
    """The state of the engine as a checkpoint has it."""

    lora = None

    def __init__(self, engine: FsdpEngine) -> None:
        self._engine = engine
        self._held = {held.shard.name: held for held in engine.weights.held}

    @property
    def layout(self) -> dict[str, Any]:
        groups = self._engine.groups
        return {"strategy": "fsdp", "world_size": groups.mesh.world_size, **asdict(groups.parallel)}

    @property
    def optimizer(self) -> ShardOptimizer:
        if self._engine.optimizer is None:
            raise EngineError("a frozen model has no checkpoint", fix="save the model that is trained")
        return self._engine.optimizer

    def shapes(self) -> dict[str, Shape]:
        return dict(self._engine.weights.tensors)

    def shards(self) -> Iterator[tuple[Shard, Tensor]]:
        return self._engine.weights.shards()

    def owned(self, shard: Shard, tensor: Tensor) -> OwnedState:
        held = self._held[shard.name]
        state = self.optimizer.state_of(held.place.name)
        return OwnedState(0, {kind: held.of(local).flatten() for kind, local in state.items()})

    def set_owned(self, shard: Shard, tensor: Tensor, state: dict[str, Tensor]) -> None:
        held = self._held[shard.name]
        for kind, local in self.optimizer.state_of(held.place.name).items():
            held.of(local).copy_(state[kind].view(shard.shape))

    def writes(self, shard: Shard) -> bool:
        """Return whether this rank has the first copy of the model."""
        return self._engine.groups.is_first_copy

    def counts(self, shard: Shard) -> bool:
        """Return whether this is the first of all ranks with the same part."""
        return self.writes(shard)

    def gradient(self, shard: Shard, tensor: Tensor) -> Tensor:
        """Return the gradient of the rank's part of a tensor."""
        held = self._held[shard.name]
        return held.of(self._engine.weights.local_gradient(held.place.name))

    def random_trackers(self) -> dict[str, Tensor]:
        return {}

    def set_random_trackers(self, states: dict[str, Tensor]) -> None:
        """Do nothing: all randomness is torch's."""
