"""`ActorRolloutRefWorker`: a rank of the policy, which it scores, trains and sends; it also keeps a frozen copy."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from mrl.algos.aggregate import LossNormalizer
from mrl.algos.chosen_tokens import UpdateTokens, select_tokens
from mrl.algos.kl import span_differences
from mrl.algos.losses import PolicyTokens
from mrl.algos.objectives import ActorColumns, actor_objective
from mrl.algos.old_policy import approximate_old_log_probs
from mrl.algos.rollout_correction import (
    RolloutPair,
    correction_metrics,
    correction_weights,
    mismatch_metrics,
    staleness_metrics,
)
from mrl.algos.rows import Rows, apply_mask
from mrl.config import step_calls
from mrl.config.algorithm import CHOOSING_LOSSES, AlgorithmConfig, DistillationConfig
from mrl.config.arithmetic import shows_success
from mrl.config.peft_settings import TENSORS_FILE
from mrl.controller import Dispatch, RankInfo, register, register_call
from mrl.dtypes import torch_dtype
from mrl.engine.adapter_files import write_peft
from mrl.engine.fp8_base import WeightsToSend
from mrl.engine.merging import MergedWeights
from mrl.engine.scores import MASK, DivergenceRequest, LossInput, LossOutput, ScoreRequest
from mrl.engine.vocab_head import EntropyUse
from mrl.errors import BatchError
from mrl.hub import node_copy
from mrl.models.families import read_spec
from mrl.models.hf_reader import HfReader, output_rows
from mrl.protocol import DataProto
from mrl.protocol.columns import jagged
from mrl.weight_sync.exchange import Held
from mrl.weight_sync.resharder import Resharder, ReshardReport, WeightSyncSpec
from mrl.weight_sync.row_planner import planner_of
from mrl.weight_sync.vllm_adapters import adapter_directory, adapters_digest
from mrl.workers.advantages import shard_advantages
from mrl.workers.frozen import ScoresAsTeacher, teacher_values
from mrl.workers.messages import MicroBatchSizes, ModelSetup, UpdateReport, WholeBatch
from mrl.workers.model_worker import (
    as_reference,
    optional_values,
    response_column,
    response_mask,
    rows_of,
    token_rows,
)


class ActorRolloutRefWorker(ScoresAsTeacher):
    def __init__(
        self, place: RankInfo, setup: ModelSetup, algorithm: AlgorithmConfig, temperature: float, horizon_tokens: int
    ) -> None:
        super().__init__(place, setup)
        self._resharder: Resharder
        self._frozen = WeightsToSend({})
        self._merged: MergedWeights | None = None
        self._adapters: Path | None = None
        self._written = 0
        self._digest, self._adapter_bytes = "", 0
        self._algorithm = algorithm
        self._temperature = temperature
        self._top_k = 0 if algorithm.distillation is None else algorithm.distillation.top_k
        self._horizon_tokens = algorithm.loss.horizon_tokens or horizon_tokens

    @register_call(step_calls.LOG_PROB)
    def compute_log_prob(self, batch: DataProto, sizes: MicroBatchSizes) -> DataProto | None:
        """Compute log-probs with the current policy, and their differences from the engines' log-probs."""
        return self._compared(batch, self._log_probs(batch, sizes))

    @register_call(step_calls.LOG_PROB_WITH_NORMS)
    def compute_log_prob_with_norms(self, batch: DataProto, sizes: MicroBatchSizes) -> DataProto | None:
        """Do the same, and return also the squared norm of each token's score, d log pi / d logits, with its
        correction in the loss."""
        scores = self.forward(token_rows(batch, {}), sizes, ScoreRequest(self._temperature, norms=True))
        answer = self._compared(batch, None if scores is None else scores.log_probs_T)
        if answer is None or scores is None or scores.norms_T is None:
            return None
        norms_T, lengths = scores.norms_T.float().cpu(), batch.lengths("responses")
        if self._algorithm.correction is not None:
            rows, rollout_T = Rows.of(torch.from_numpy(lengths.copy())), batch.values("rollout_log_probs")
            pair = RolloutPair(rows, response_mask(batch), answer.values("old_log_probs"), rollout_T)
            norms_T = norms_T * correction_weights(pair, self._algorithm.correction).square()
        return answer.with_column("score_norms", jagged(norms_T.float(), lengths))

    @register_call(step_calls.LOG_PROB_WITH_ROUTES)
    def compute_log_prob_with_routes(self, batch: DataProto, sizes: MicroBatchSizes) -> DataProto | None:
        """Do the same, and return also the experts that the policy chose for each token."""
        rows, micro_batches = token_rows(batch, {}), self.micro_batches(sizes)
        scores, routes = self.engine.forward_with_routes(rows, micro_batches, ScoreRequest(self._temperature))
        answer = self._compared(batch, None if scores is None else scores.log_probs_T)
        return None if answer is None else answer.with_column("routes", jagged(routes, rows.lengths - 1))

    def _compared(self, batch: DataProto, log_probs_T: Tensor | None) -> DataProto | None:
        """Return the log-probs as a column, with their differences from the engines' log-probs."""
        others = self.engine.other_experts()
        answer = response_column(batch, "old_log_probs", log_probs_T)
        if answer is not None and log_probs_T is not None and "rollout_log_probs" in batch.columns():
            rows = Rows.of(torch.from_numpy(batch.lengths("responses").copy()))
            pair = RolloutPair(rows, response_mask(batch), log_probs_T.cpu(), batch.values("rollout_log_probs"))
            answer.meta_info = mismatch_metrics(pair, self.sum_over_shards, self.max_over_shards)
            if self._algorithm.correction is not None:
                answer.meta_info |= correction_metrics(pair, self._algorithm.correction, self.sum_over_shards)
            if "staleness" in batch.columns():
                ages_T = batch.values("staleness")
                answer.meta_info |= staleness_metrics(pair, ages_T, self.sum_over_shards, self.max_over_shards)
            answer.meta_info |= others
        return answer

    @register_call(step_calls.REF_LOG_PROB)
    def compute_ref_log_prob(self, batch: DataProto, sizes: MicroBatchSizes) -> DataProto | None:
        """Compute log-probs of the responses with the policy before training."""
        with as_reference(self):
            return response_column(batch, "ref_log_probs", self._log_probs(batch, sizes))

    @register_call(step_calls.ACTOR_ADVANTAGES)
    def compute_advantages(self, batch: DataProto, whole: WholeBatch) -> DataProto:
        """Compute advantages, for algorithms without a critic."""
        columns = shard_advantages(batch, whole, self._algorithm, self.sum_over_shards, self.max_over_shards)
        return columns.select("advantages")

    @register_call(step_calls.UPDATE_ACTOR)
    def update_actor(self, batch: DataProto, sizes: MicroBatchSizes) -> UpdateReport:
        """Make one optimizer step on these rows. Without old log-probs, the policy's own are used."""
        if self.setup.replays_routes and "routes" not in batch.columns():
            raise BatchError("router replay needs the column `routes`, which nothing has written")
        if self._algorithm.keep_sampling_mask and MASK not in batch.columns():
            raise BatchError(f"log-probs over sampled tokens need the column `{MASK}`, which nothing has written")
        names = ("advantages", "old_log_probs", "ref_log_probs", "rollout_log_probs", "staleness")
        columns = optional_values(batch, *names)
        columns |= teacher_values(batch, only_some=shows_success(self._algorithm))
        loss = self._algorithm.loss
        if loss.policy in CHOOSING_LOSSES:
            columns["selected"] = self._selected(batch, columns)
        rows = token_rows(batch, columns)
        norm = LossNormalizer.of(
            loss.aggregation, rows_of(rows), rows.columns["response_mask"], self._horizon_tokens, self.sum_over_shards
        )
        entropy: EntropyUse = "grad" if loss.entropy_coef else "value" if loss.log_entropy else "none"
        request = ScoreRequest(self._temperature, entropy, divergence=self._divergence())
        return self.update(rows, sizes, partial(policy_loss, self._algorithm, norm), request)

    def _selected(self, batch: DataProto, columns: Mapping[str, Tensor]) -> Tensor:
        """Return the tokens of this update that the policy loss treats differently."""
        loss = self._algorithm.loss
        if "old_log_probs" not in columns:
            raise BatchError(f"{loss.policy} needs the column `old_log_probs`, which nothing has written")
        lengths_B, ids_B = torch.from_numpy(batch.lengths("responses").copy()), torch.from_numpy(batch.row_ids.copy())
        old_T, advantages_T = columns["old_log_probs"], columns["advantages"]
        rows, rollout_T = Rows.of(lengths_B), columns.get("rollout_log_probs")
        tokens = UpdateTokens(rows, response_mask(batch), old_T, advantages_T, ids_B, self.sum_over_shards, rollout_T)
        return select_tokens(tokens, loss)

    def _divergence(self) -> DivergenceRequest | None:
        """Return the divergence to compute, if any. The teacher's matrix is on the device only while it is used."""
        distillation, teacher_VH = self._algorithm.distillation, None
        if distillation is None or distillation.form not in ("top_k", "full"):
            return None
        if distillation.form == "full" and self.engine.groups.is_last_stage:
            teacher_VH = self._teacher_matrix.to(self.engine.groups.device)
        return DivergenceRequest(distillation.beta, teacher_VH)

    @cached_property
    def _teacher_matrix(self) -> Tensor:
        assert self.setup.teacher is not None, "learning over the full vocabulary needs a teacher"
        path, groups = str(node_copy(self.setup.teacher)), self.engine.groups
        vocab, tp = self.engine.request.spec.vocab, groups.parallel.tp
        matrix = output_rows(HfReader(path), read_spec(path), vocab, groups.at.tp, tp)
        return matrix.to(torch_dtype(self.setup.settings.dtype))

    @register(Dispatch.ONE_TO_ALL)
    def prepare_sending(self, route: WeightSyncSpec) -> None:
        """Plan the transfer of this rank's weights to the engines."""
        groups, spec = self.engine.groups, self.engine.request.spec
        held: Held
        held = self._frozen = self.engine.weights_to_send()
        self._adapters = route.adapters
        if self.engine.adapters is not None and route.adapters is None:
            held = self._merged = self.engine.adapters.merged(held, torch_dtype(route.dtype))
            self._merged.begin()
        planner = planner_of(spec, groups.parallel, groups.mesh.world_size, route)
        transport = route.transport(self.rank, groups.device)
        self._resharder = Resharder(planner, transport, held, route, (groups.tp, groups.etp))
        if self._merged is not None:
            self._merged.forget()

    @register(Dispatch.ONE_TO_ALL)
    def send_weights(self, version: int, workers: list[int]) -> ReshardReport:
        """Send the current weights to these engine workers, and verify that they arrived."""
        self.engine.memory.need("parameters")
        if self._adapters is not None and self._written != version:
            self._write_adapters(self._adapters, version)
        if self._merged is None:
            report = self._resharder.send(version, workers)
            self._frozen.forget()
            if self._digest:
                report = replace(report, adapters=self._digest, adapter_bytes=self._adapter_bytes)
            return report
        self._merged.begin()
        report = self._resharder.send(version, workers)
        loss = self._merged.loss
        self._merged.forget()  # frees the merged tensors
        self._frozen.forget()
        return replace(report, moved=loss.moved, lost=loss.lost)

    def _write_adapters(self, shared: Path, version: int) -> None:
        """Write the adapters for the engines. All ranks wait until the files are complete."""
        adapters = self.engine.adapters
        assert adapters is not None, "engines get the adapters of a model that has some"
        tensors = adapters.gathered(self.engine.groups)
        if tensors:
            write_peft(adapter_directory(shared, version), tensors, adapters.lora, self.setup.path)
            file = adapter_directory(shared, version) / TENSORS_FILE
            self._digest, self._adapter_bytes = adapters_digest(file), file.stat().st_size
            shutil.rmtree(adapter_directory(shared, self._written - 1), ignore_errors=True)
        torch.distributed.barrier()
        self._written = version

    def _log_probs(self, batch: DataProto, sizes: MicroBatchSizes) -> Tensor | None:
        scores = self.forward(token_rows(batch, {}), sizes, ScoreRequest(self._temperature))
        return None if scores is None else scores.log_probs_T


def policy_loss(config: AlgorithmConfig, norm: LossNormalizer, batch: LossInput) -> LossOutput:
    columns, log_probs_T = batch.columns, batch.scores.log_probs_T
    assert log_probs_T is not None, "a policy returns log-probs"
    rows, mask_T = rows_of(batch, log_probs_T.device), columns["response_mask"]
    if config.old_log_probs == "trainer":
        old_T = columns.get("old_log_probs", log_probs_T.detach())
    else:
        pair = RolloutPair(rows, mask_T, log_probs_T.detach(), columns["rollout_log_probs"])
        old_T = approximate_old_log_probs(config.old_log_probs, pair, columns.get("staleness"))
    weights_T = None
    if config.correction is not None:
        pair = RolloutPair(rows, mask_T, old_T, columns["rollout_log_probs"])
        weights_T = correction_weights(pair, config.correction)
    extra = ActorColumns(
        columns.get("ref_log_probs"),
        batch.scores.entropy_T,
        weights_T,
        columns.get("teacher_log_probs"),
        batch.scores.divergence_T,
        columns.get("taught"),
        columns.get(step_calls.TEACHER_SPANS),
    )
    tokens = PolicyTokens(rows, mask_T, log_probs_T, old_T, columns["advantages"], columns.get("selected"))
    objective = actor_objective(tokens, config.loss, norm, extra, config.kl, config.distillation)
    means = _means(batch, norm, config.distillation)
    return LossOutput(objective.loss, {"loss": objective.loss.detach()} | objective.reports | means)


def _means(batch: LossInput, norm: LossNormalizer, distillation: DistillationConfig | None) -> dict[str, Tensor]:
    """Return means over the update's tokens of values that the loss does not report."""
    mask_T, log_probs_T, entropy_T = batch.columns["response_mask"], batch.scores.log_probs_T, batch.scores.entropy_T
    assert log_probs_T is not None, "a policy returns log-probs"
    means_T = {} if entropy_T is None else {"entropy_mean": entropy_T.detach()}
    if "rollout_log_probs" in batch.columns:
        means_T["rollout_diff"] = (log_probs_T.detach() - batch.columns["rollout_log_probs"]).abs()
    if distillation is not None:
        taught_T = batch.columns.get("taught", mask_T)
        difference_T = apply_mask(log_probs_T.detach() - batch.columns["teacher_log_probs"], taught_T)
        spans_T = batch.columns.get(step_calls.TEACHER_SPANS)
        signal_T = difference_T
        if spans_T is not None:
            signal_T = span_differences(difference_T, batch.columns["teacher_log_probs"], spans_T)
        means_T |= {"teacher_kl": difference_T, "taught_abs": distillation.coef * signal_T.abs()}
        means_T["advantages_abs"] = distillation.reward_coef * batch.columns["advantages"].abs()
        if "taught" in batch.columns:
            means_T["taught_tokens"] = taught_T.to(difference_T.dtype)
        if batch.scores.teacher_mass_T is not None:
            means_T["teacher_mass"] = apply_mask(batch.scores.teacher_mass_T, taught_T)
    num_tokens = max(norm.num_tokens, 1.0)
    means = {name: torch.where(mask_T, value_T, 0.0).sum() / num_tokens for name, value_T in means_T.items()}
    return means | {"tokens": mask_T.sum()}
