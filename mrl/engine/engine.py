"""MegatronEngine: one model in one layout, on this rank. Takes rows and returns log-probs, values or gradients."""

from __future__ import annotations

import mrl.engine.with_megatron  # noqa: F401

# isort: split
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from mrl.config.lora import LoraConfig
from mrl.config.schema import MegatronModelConfig, TrainedModelConfig
from mrl.data.packing import PackingRules, RowCost
from mrl.engine import weights
from mrl.engine.adapters import Adapters
from mrl.engine.base_digest import digest_over_ranks, is_first_copy
from mrl.engine.expert_load import ExpertLoad
from mrl.engine.first_adapters import first_adapters
from mrl.engine.fp8_base import WeightsToSend, fp8_memory, keep_in_fp8
from mrl.engine.model import ModelRequest, TokenModel, build_chunks, transformer_config
from mrl.engine.offload import DeviceMemory, memory_of
from mrl.engine.optimizer import Optimizer, StepOutcome
from mrl.engine.packed_rows import MicroBatch, TokenRows, pack
from mrl.engine.parallel import ParallelGroups
from mrl.engine.pipeline_p2p import pipeline_arguments
from mrl.engine.router_replay import RouterReplay
from mrl.engine.scores import LossFunction, LossInput, ScoreRequest, Scores, merged, score
from mrl.engine.shared_model import SharedModel
from mrl.engine.training_state import MegatronState
from mrl.errors import EngineError
from mrl.models.fp8_base import fp8_shards
from mrl.models.hf_reader import HfReader
from mrl.models.spec import ModelSpec
from mrl.models.table import SCORE, Head, Shard, hf_tensors
from mrl.spans import SPANS

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class EngineRequest:
    """A model, its head and its settings. Settings of the type `TrainedModelConfig` make it trainable."""

    spec: ModelSpec
    head: Head
    settings: MegatronModelConfig
    new_head: bool = False
    """Whether a score head that is missing in the files starts at zero."""
    seed: int = 0
    """Seed of new adapters."""
    replays_routes: bool = False
    """Whether the experts of each token may come from another pass."""

    @property
    def lora(self) -> LoraConfig | None:
        return self.settings.lora if isinstance(self.settings, TrainedModelConfig) else None


class MegatronEngine:
    """A model on this rank.

    Call each method on all ranks of the layout, with this rank's data-parallel shard of rows.
    """

    memory: DeviceMemory
    """Memory of the model on the device; set by `load`."""
    source: str
    """Directory that the weights came from; set by `load`."""

    def __init__(self, request: EngineRequest, groups: ParallelGroups, shared: SharedModel | None = None) -> None:
        """Build the model, or use the model of another engine in this process."""
        self.request, self.groups = request, groups
        settings = request.settings
        model = ModelRequest(request.spec, request.head, settings.dtype, settings.megatron, request.lora)
        self.shared = shared
        if shared is None:
            self.config = transformer_config(model, groups)
            self.models = build_chunks(model, self.config, groups)
        else:
            self.config, self.models = shared.first.config, shared.first.models
            shared.join(self)
        self.adapters: Adapters | None = None
        if request.lora is not None:
            self.adapters = Adapters(self.models, request.spec, request.lora, groups, request.head)
        self.optimizer: Optimizer | None = None
        self._base_digest = ""
        self.expert_load: ExpertLoad | None = None
        bias_rate = settings.router_bias_update_rate if isinstance(settings, TrainedModelConfig) else 0.0
        if request.spec.moe:
            self.expert_load = ExpertLoad(self.models, request.spec, groups, bias_rate)
        self.router_replay: RouterReplay | None = None
        if request.replays_routes:
            self.router_replay = RouterReplay(self.models, request.spec, groups)
        self.watch: Callable[[], AbstractContextManager[None]] | None = None
        """Context of the passes of an update while a step is recorded."""

    @property
    def training_state(self) -> MegatronState:
        request = self.request
        return MegatronState(self.groups, self.models, request.spec, request.head, self.adapters, self.optimizer)

    def weights_to_send(self) -> WeightsToSend:
        return weights.weights_to_send(self.models, self.request.spec, self.request.head, self.groups)

    def held_tensors(self) -> Iterator[tuple[Shard, Tensor]]:
        """Yield the parts of the model's tensors that this rank holds."""
        return weights.held_tensors(self.models, self.request.spec, self.request.head, self.groups)

    @property
    def packing(self) -> PackingRules:
        """Packing rules for micro-batches of this model in this layout."""
        spec, parallel, cut = self.request.spec, self.groups.parallel, self.groups.sequence_sharding
        pair = spec.attention_flops_per_token_pair
        return PackingRules(
            # A causal row of n tokens has n (n + 1) / 2 pairs.
            RowCost(spec.flops_per_token + pair / 2, pair / 2),
            row_multiple=cut.row_multiple,
            pack_multiple=cut.pack_multiple,
            count_multiple=parallel.pp if parallel.vpp > 1 else 1,
            context_size=parallel.cp,
        )

    def load(self, reader: HfReader) -> None:
        """Read the weights, and set up training if the settings ask for it."""
        request, self.source = self.request, str(reader.path)
        reader.check(request.spec, request.head, request.new_head)
        if self.shared is None:
            weights.load(self.models, reader, request.spec, request.head, self.groups)
            if request.lora is not None and request.lora.base_quantization is not None:
                place = weights.rank_place(self.groups)
                keep_in_fp8(self.models, fp8_shards(request.spec, self.groups.parallel, place))
        else:
            weights.zero_score_head(self.models)
        if self.adapters is not None:
            self.adapters.fill(first_adapters(request.spec, self.adapters.lora, request.seed))
        if isinstance(request.settings, TrainedModelConfig):
            self.optimizer = Optimizer(self.models, request.settings)
        frozen = [tensor for shard, tensor in self.held_tensors() if not shard.trained]
        frozen += fp8_memory(self.models)
        self.memory = memory_of(self.models, self.optimizer, self.groups.device, frozen)
        if self.shared is not None:
            self.memory.share_frozen(self.shared.first.memory)
            self.shared.all_learn()

    def base_digest(self) -> str:
        """Return the digest of the frozen weights of a model with adapters, otherwise an empty string.

        The first call must be made on all ranks.
        """
        if self.adapters is None:
            return ""
        if not self._base_digest:
            request, at = self.request, self.groups.at
            held = (
                (shard, tensor)
                for shard, tensor in self.held_tensors()
                if shard.name != SCORE  # trained whole
                and is_first_copy(shard, at.etp if shard.expert else at.tp)
                and (at.edp if shard.expert else at.dp + at.cp) == 0
            )
            names = [name for name in hf_tensors(request.spec, request.head) if name != SCORE]
            self._base_digest = digest_over_ranks(names, held, self.groups.device)
        return self._base_digest

    @torch.no_grad()
    def forward(self, rows: TokenRows, micro_batches: Sequence[Rows], scores: ScoreRequest) -> Scores | None:
        """Return the scores of all response tokens in row order; None on ranks outside the last stage."""
        self.memory.need("parameters")
        for model in self.models:
            model.eval()
        packed = self._pack(rows, micro_batches)
        outputs: list[Scores] = self._run(packed, partial(_only_scores, scores), forward_only=True)
        if not self.groups.is_last_stage:
            return None
        return merged(outputs, micro_batches, rows.response_lengths)

    def forward_with_routes(
        self, rows: TokenRows, micro_batches: Sequence[Rows], scores: ScoreRequest
    ) -> tuple[Scores | None, Tensor]:
        """Return the scores, and the experts that the routers chose [tokens, layers with experts, experts per token].

        The last token of a row has no routes, because nothing is predicted after it.
        """
        assert self.router_replay is not None, "only a model with router replay records routes"
        self.router_replay.record()
        found = self.forward(rows, micro_batches, scores)
        return found, self.router_replay.take_recorded(rows, micro_batches)

    def forward_backward(
        self, rows: TokenRows, micro_batches: Sequence[Rows], loss: LossFunction, scores: ScoreRequest
    ) -> dict[str, float]:
        """Accumulate gradients of the loss. Return metrics summed over this shard's rows.

        The result is empty on ranks outside the last stage.
        """
        self.memory.need("parameters", "gradients")
        if self.adapters is not None and not self.adapters.is_on:
            raise EngineError("the adapters are off: nothing can be trained until they are on again")
        for model in self.models:
            model.train()
        packed = self._pack(rows, micro_batches)
        reports = self._run(packed, partial(_loss, scores, loss), forward_only=False)
        names = reports[0] if reports else {}
        return {name: float(sum(float(report[name]) for report in reports)) for name in names}

    def other_experts(self) -> dict[str, float]:
        """Return how often the routers would have chosen other experts since the last call. Call this on all ranks."""
        return {} if self.router_replay is None else self.router_replay.take_difference()

    def update(
        self, rows: TokenRows, micro_batches: Sequence[Rows], loss: LossFunction, scores: ScoreRequest
    ) -> tuple[dict[str, float], StepOutcome]:
        self.memory.check("parameters", "gradients", "optimizer")
        assert self.optimizer is not None, "only a trained engine has an optimizer"
        self.optimizer.zero_grad()
        with (
            SPANS("forward_backward", micro_batches=len(micro_batches)),
            nullcontext() if self.watch is None else self.watch(),
        ):
            reports = self.forward_backward(rows, micro_batches, loss, scores)
        self.memory.need("optimizer")
        with SPANS("optimizer"):
            outcome = self.optimizer.step()
        if outcome.applied:
            self.memory.changed()
        return reports, outcome

    def _pack(self, rows: TokenRows, micro_batches: Sequence[Rows]) -> list[MicroBatch]:
        return [pack(rows.take(index), self.groups.sequence_sharding, self.groups.device) for index in micro_batches]

    def _run(self, batches: Sequence[MicroBatch], last_step: Any, forward_only: bool) -> list[Any]:
        """Run Megatron's pipeline schedule over the micro-batches. Return the outputs that the last stage collected."""
        if self.shared is not None:
            self.shared.select(self)
        chunks = self.models if self.optimizer is None else self.optimizer.chunks
        replay = self.router_replay
        if replay is not None:
            replay.begin(replays=any(batch.routes_TLK is not None for batch in batches), trains=not forward_only)
        outputs: list[Any] = get_forward_backward_func()(
            forward_step_func=partial(_forward_step, last_step, replay, None if forward_only else self.expert_load),
            data_iterator=[iter(batches) for _ in chunks],
            model=chunks,
            num_microbatches=len(batches),
            seq_length=1,  # stages exchange the shapes
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
            **pipeline_arguments(self.config, self.groups),
        )
        if replay is not None:
            replay.end()
        _forget_last_micro_batch(self.models)
        return outputs


def _forget_last_micro_batch(models: Sequence[TokenModel]) -> None:
    """Drop the tensors of the last micro-batch that Megatron keeps. The engines on the same device could not use their
    memory.

    * The input of a pipeline stage, with its gradient.
    * The buffer of sequences that tensor ranks gather: 0.25 GiB for 16384 tokens of a 70B model.
    """
    for model in models:
        model.decoder.input_tensor = None
    parallel_state.get_global_memory_buffer().buffer.clear()


def _forward_step(
    last_step: Any, replay: RouterReplay | None, load: ExpertLoad | None, batches: Iterator[MicroBatch], model: Any
) -> tuple[Tensor, Any]:
    batch = next(batches)
    while not hasattr(inner := model, "run"):
        model = inner.module
    if replay is not None:
        replay.tell(inner, batch)
    if load is not None:
        load.tell(inner, batch)
    return inner.run(batch), partial(last_step, inner, batch)


def _only_scores(request: ScoreRequest, model: Any, batch: MicroBatch, hidden: Tensor, non_loss_data: bool) -> Scores:
    return score(model, batch, hidden, request)


def _loss(
    request: ScoreRequest, loss: LossFunction, model: Any, batch: MicroBatch, hidden: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    rows = batch.rows
    columns = {name: column.to(hidden.device) for name, column in rows.columns.items()}
    output = loss(LossInput(score(model, batch, hidden, request), rows.response_lengths, columns))
    # The second value is a token count that Megatron would divide by; `_finalize_gradients` prevents this.
    return output.loss, torch.ones((), dtype=torch.int, device=hidden.device), dict(output.reports)
