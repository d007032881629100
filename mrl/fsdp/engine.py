"""FsdpEngine: one model of transformers, sharded by torch, on this rank. It has the methods of `MegatronEngine`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mrl.config.lora import LoraConfig
from mrl.config.schema import MegatronModelConfig, TrainedModelConfig
from mrl.data.packing import PackingRules, RowCost
from mrl.dtypes import torch_dtype
from mrl.engine.base_digest import digest_over_ranks
from mrl.engine.first_adapters import first_adapters
from mrl.engine.fp8_base import WeightsToSend
from mrl.engine.offload import FROZEN, DeviceMemory
from mrl.engine.packed_rows import Lengths, MicroBatch, TokenRows, pack
from mrl.engine.scores import LossFunction, LossInput, ScoreRequest, Scores, merged
from mrl.engine.steps import StepOutcome
from mrl.errors import EngineError
from mrl.fsdp.adapters import ShardedAdapters, attach
from mrl.fsdp.model import Build, RowModel, build
from mrl.fsdp.optimizer import ShardOptimizer
from mrl.fsdp.parallel import ShardGroups
from mrl.fsdp.probe import check_packing
from mrl.fsdp.training_state import ShardState
from mrl.fsdp.weights import ShardedWeights
from mrl.models.hf_reader import HfReader
from mrl.models.spec import ModelSpec
from mrl.models.table import SCORE, Head, Shard, hf_tensors
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
    seed: int = 0
    """Seed of new adapters."""

    @property
    def lora(self) -> LoraConfig | None:
        return self.settings.lora if isinstance(self.settings, TrainedModelConfig) else None


class FsdpEngine:
    """A model on this rank.

    Call each method on all ranks of the layout, with this rank's data-parallel shard of rows.
    """

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
        self.adapters: ShardedAdapters | None = None
        self.optimizer: ShardOptimizer | None = None
        self._base_digest = ""
        self.watch: Callable[[], AbstractContextManager[None]] | None = None
        """Context of the passes of an update while a step is recorded."""

    @property
    def models(self) -> list[RowModel]:
        return [self.model]

    @property
    def training_state(self) -> ShardState:
        return ShardState(self.groups, self.weights, self.adapters, self._trained(), self.optimizer)

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
        shard, lora = self.groups.shard, request.lora
        stored = torch.float32 if isinstance(settings, TrainedModelConfig) and lora is None else compute
        adapts = None if lora is None else partial(attach, request.spec, lora, request.head)
        order = Build(Path(reader.path), request.head, compute, stored, settings.fsdp.recompute, adapts)
        self.model = build(order, self.groups)
        tensors = hf_tensors(request.spec, request.head)
        self.weights = ShardedWeights(self.model, tensors, shard.rank(), shard.size())
        self.weights.check_table(untrained_tensors(request.spec))
        self.weights.load(reader)
        if lora is not None:
            self.adapters = ShardedAdapters(self.weights, request.spec, lora, shard, compute)
            self.adapters.fill(first_adapters(request.spec, lora, request.seed))
        check_packing(self.model, self.groups, compute)
        if isinstance(settings, TrainedModelConfig):
            decayed = self.weights.decayed() if lora is None else {*self._trained()}  # adapters are matrices
            self.optimizer = ShardOptimizer(self._trained(), decayed, settings, shard)
        else:
            self.model.requires_grad_(False)
        self.memory = self._memory()

    def _trained(self) -> dict[str, Tensor]:
        """Return the parameters that learn. With adapters, the model itself is frozen, except a score head."""
        if self.adapters is None:
            return dict(self.weights.parameters)
        scores = {name: parameter for name, parameter in self.weights.parameters.items() if name == SCORE}
        return {**self.adapters.parameters, **scores}

    def _memory(self) -> DeviceMemory:
        trained, others = self._trained(), self.weights.parameters
        held = {"parameters": [cast(DTensor, x.detach()).to_local() for x in trained.values()]}
        if self.adapters is not None:
            held[FROZEN] = [self.weights.local(name) for name in others if name not in trained]
        if self.optimizer is None:
            return DeviceMemory(held, self.groups.device)
        held |= {"gradients": [], "optimizer": []}
        return DeviceMemory(held, self.groups.device, self.optimizer.state_tensors)

    def held_tensors(self) -> Iterator[tuple[Shard, Tensor]]:
        """Yield the parts of the model's tensors that this rank holds."""
        return self.weights.shards()

    def weights_to_send(self) -> WeightsToSend:
        return WeightsToSend({(shard.chunk, shard.name): tensor for shard, tensor in self.held_tensors()})

    def base_digest(self) -> str:
        """Return the digest of the frozen weights of a model with adapters, otherwise an empty string.

        The first call must be made on all ranks.
        """
        if self.adapters is not None and not self._base_digest:
            groups = self.groups
            held = (
                (shard, tensor)
                for shard, tensor in self.held_tensors()
                if shard.name != SCORE  # trained whole
                and (groups.is_first_copy if shard.trained else groups.at.rank == 0)  # all ranks hold the buffers
            )
            names = [name for name in self.weights.tensors if name != SCORE]
            self._base_digest = digest_over_ranks(names, held, groups.device)
        return self._base_digest

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
        if self.adapters is not None and not self.adapters.is_on:
            raise EngineError("the adapters are off: nothing can be trained until they are on again")
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
