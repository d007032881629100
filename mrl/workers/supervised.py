"""Workers for supervised training: on responses, or on preferences between responses.

With ranked responses, a micro-batch contains whole groups: the responses to one prompt, where `rank` 0 is preferred to
1, and so on.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from mrl.algos.aggregate import LossNormalizer
from mrl.algos.kto import LabeledTokens, LabelTotals, kto_objective
from mrl.algos.preference import Pairs, RankedTokens, RankingTotals, preference_objective, reward_objective
from mrl.config.sft import WITHOUT_REFERENCE, DpoLossConfig, RewardLossConfig
from mrl.controller import Dispatch, RankInfo, register
from mrl.engine.packed_rows import TokenRows
from mrl.engine.scores import LossInput, LossOutput, ScoreRequest
from mrl.errors import EngineError
from mrl.protocol import DataProto
from mrl.protocol.columns import jagged
from mrl.workers.messages import MicroBatchSizes, ModelSetup, UpdateReport
from mrl.workers.model_worker import (
    ModelWorker,
    as_reference,
    last_tokens,
    response_column,
    rows_of,
    score_column,
    token_rows,
)


class RmWorker(ModelWorker):
    """A rank of a reward model. Its score, read at a response's last token, learns the preferences."""

    def __init__(self, place: RankInfo, setup: ModelSetup, loss: RewardLossConfig) -> None:
        super().__init__(place, setup)
        self._loss = loss

    @register(Dispatch.DATA_PARALLEL, reads=("prompts", "responses", "rank", "label"))
    def update_rm(self, batch: DataProto, sizes: MicroBatchSizes) -> UpdateReport:
        group_B, rank_B = groups_of(batch["rank"])
        totals = RankingTotals.of(group_B, self.sum_over_shards)
        rows = replace(last_tokens(batch), columns={"group": group_B, "rank": rank_B, "label": batch["label"]})
        return self.update(rows, sizes, partial(reward_loss, self._loss, totals), ScoreRequest())

    @register(Dispatch.DATA_PARALLEL, reads=("prompts", "responses"), writes=("scores",))
    def score_rm(self, batch: DataProto, sizes: MicroBatchSizes) -> DataProto | None:
        return score_column(batch, "scores", self.forward(last_tokens(batch), sizes, ScoreRequest()))


class DpoWorker(ModelWorker):
    """A rank of a policy that learns preferences, relative to itself before training."""

    def __init__(self, place: RankInfo, setup: ModelSetup, loss: DpoLossConfig) -> None:
        super().__init__(place, setup)
        self._loss = loss

    @register(Dispatch.DATA_PARALLEL, reads=("prompts", "responses"), writes=("ref_log_probs",))
    def compute_ref_log_prob(self, batch: DataProto, sizes: MicroBatchSizes) -> DataProto | None:
        """Return the log-probs of all response tokens from the policy before its first update, without adapters."""
        assert self.engine.optimizer is not None, "the policy is trained"
        if num_steps := self.engine.optimizer.num_steps:
            problem = f"the policy has made {num_steps} updates: it is no longer the reference"
            raise EngineError(
                problem, fix="compute the reference before the first update and before a checkpoint is loaded"
            )
        adapters = self.engine.adapters
        with nullcontext() if adapters is None else adapters.off():  # `lora.path` has adapters from the start
            scores = self.forward(token_rows(batch, {}), sizes, ScoreRequest())
        return None if scores is None else response_column(batch, "ref_log_probs", scores.log_probs_T)

    @register(
        Dispatch.DATA_PARALLEL,
        reads=("prompts", "responses", "rank", "label"),
        optional=("response_mask", "ref_log_probs"),
    )
    def update_dpo(self, batch: DataProto, sizes: MicroBatchSizes) -> UpdateReport:
        """Make one optimizer step on these groups.

        If the worker keeps the reference, it computes the same micro-batches, so that both round alike: the first
        margins are 0.
        """
        rows = token_rows(batch, {})
        row_ranges = rows_of(rows)
        mask_T, (group_B, rank_B) = rows.columns["response_mask"], groups_of(batch["rank"])
        columns = {"group": row_ranges.expand(group_B), "rank": row_ranges.expand(rank_B)}
        if (ref_log_probs_T := self._reference_log_probs(batch, rows, sizes)) is not None:
            columns["ref_log_probs"] = ref_log_probs_T
        best_mask_T = mask_T & (columns["rank"] == 0)
        best = LossNormalizer.of("token-mean", row_ranges, best_mask_T, sum_over_ranks=self.sum_over_shards)
        totals = RankingTotals.of(group_B, self.sum_over_shards)
        loss = partial(preference_loss, self._loss, best, totals)
        return self.update(replace(rows, columns={**rows.columns, **columns}), sizes, loss, ScoreRequest())

    @register(
        Dispatch.DATA_PARALLEL,
        reads=("prompts", "responses", "label", "kl_baseline"),
        optional=("response_mask",),
    )
    def update_kto(self, batch: DataProto, sizes: MicroBatchSizes) -> UpdateReport:
        """Make one optimizer step on these labeled responses. `kl_baseline` is the baseline of the whole update."""
        rows = token_rows(batch, {})
        row_ranges = rows_of(rows)
        columns = {name: row_ranges.expand(batch[name]) for name in ("label", "kl_baseline")}
        ref_log_probs_T = self._reference_log_probs(batch, rows, sizes)
        assert ref_log_probs_T is not None, "KTO has a reference"
        columns["ref_log_probs"] = ref_log_probs_T
        loss = partial(labeled_loss, self._loss, LabelTotals.of(batch["label"] == 1, self.sum_over_shards))
        return self.update(replace(rows, columns={**rows.columns, **columns}), sizes, loss, ScoreRequest())

    @register(
        Dispatch.DATA_PARALLEL,
        reads=("prompts", "responses"),
        optional=("response_mask", "ref_log_probs"),
        writes=("sum_log_probs", "sum_ref_log_probs", "num_tokens"),
    )
    def score_dpo(self, batch: DataProto, sizes: MicroBatchSizes) -> DataProto | None:
        """Return the summed log-probs of each response by policy and reference, and its number of tokens."""
        rows = token_rows(batch, {})
        scores = self.forward(rows, sizes, ScoreRequest())
        ref_log_probs_T = self._reference_log_probs(batch, rows, sizes)
        if scores is None:
            return None
        assert scores.log_probs_T is not None, "a language model returns log-probs"
        mask_T, row_ranges = rows.columns["response_mask"], rows_of(rows)
        log_probs_T = scores.log_probs_T.double().cpu()
        refs_T = torch.zeros_like(log_probs_T) if ref_log_probs_T is None else ref_log_probs_T.double()
        sums = [row_ranges.sum(torch.where(mask_T, values_T, 0.0)) for values_T in (log_probs_T, refs_T)]
        columns = {"sum_log_probs": sums[0], "sum_ref_log_probs": sums[1], "num_tokens": row_ranges.count(mask_T)}
        return DataProto.from_dict(columns, row_ids=batch.row_ids)

    def _reference_log_probs(self, batch: DataProto, rows: TokenRows, sizes: MicroBatchSizes) -> Tensor | None:
        """Return the reference's log-probs on the host, from the batch or from the kept weights.

        Zeros on stages that compute none; None for a loss without reference.
        """
        if self._loss.loss in WITHOUT_REFERENCE:
            return None
        if "ref_log_probs" in batch.columns():
            return batch.values("ref_log_probs")
        with as_reference(self):
            scores = self.forward(rows, sizes, ScoreRequest())
        if scores is None or scores.log_probs_T is None:
            return torch.zeros(int(rows.response_lengths.sum()))
        return scores.log_probs_T.float().cpu()


def groups_of(rank_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return the group number of each row, and the ranks. Each group begins with its best response."""
    return (rank_B == 0).cumsum(0), rank_B


def reward_loss(config: RewardLossConfig, totals: RankingTotals, batch: LossInput) -> LossOutput:
    assert batch.scores.values_T is not None, "a score head returns values"
    pairs = Pairs.of(batch.columns["group"], batch.columns["rank"])
    objective = reward_objective(batch.scores.values_T, pairs, batch.columns["label"], config, totals)
    return LossOutput(objective.loss, objective.reports)


def preference_loss(config: DpoLossConfig, norm: LossNormalizer, totals: RankingTotals, batch: LossInput) -> LossOutput:
    log_probs_T, columns = batch.scores.log_probs_T, batch.columns
    assert log_probs_T is not None, "a language model returns log-probs"
    rows = rows_of(batch, log_probs_T.device)
    first_values = {name: columns[name][rows.starts_B] for name in ("group", "rank")}
    tokens = RankedTokens(
        rows,
        columns["response_mask"],
        log_probs_T,
        columns.get("ref_log_probs"),
        Pairs.of(first_values["group"], first_values["rank"]),
        columns["rank"] == 0,
    )
    objective = preference_objective(tokens, config, norm, totals)
    return LossOutput(objective.loss, objective.reports)


def labeled_loss(config: DpoLossConfig, totals: LabelTotals, batch: LossInput) -> LossOutput:
    log_probs_T, columns = batch.scores.log_probs_T, batch.columns
    assert log_probs_T is not None, "a language model returns log-probs"
    rows = rows_of(batch, log_probs_T.device)
    label_B, baseline_B = (columns[name][rows.starts_B] for name in ("label", "kl_baseline"))
    tokens = LabeledTokens(
        rows, columns["response_mask"], log_probs_T, columns["ref_log_probs"], label_B == 1, baseline_B
    )
    objective = kto_objective(tokens, config, totals)
    return LossOutput(objective.loss, objective.reports)


class SftWorker(ModelWorker):
    @register(Dispatch.DATA_PARALLEL, reads=("prompts", "responses"), optional=("response_mask",))
    def update_sft(self, batch: DataProto, sizes: MicroBatchSizes) -> UpdateReport:
        """Make one optimizer step towards these responses. Prompts are read, but not learned."""
        rows = token_rows(batch, {})
        mask_T = rows.columns["response_mask"]
        norm = LossNormalizer.of("token-mean", rows_of(rows), mask_T, sum_over_ranks=self.sum_over_shards)
        return self.update(rows, sizes, partial(likelihood_loss, norm), ScoreRequest())

    @register(
        Dispatch.DATA_PARALLEL,
        reads=("prompts", "responses"),
        optional=("response_mask",),
        writes=("sum_log_probs", "num_learned"),
    )
    def score_sft(self, batch: DataProto, sizes: MicroBatchSizes) -> DataProto | None:
        """Return the parts of each row's loss: the sum of the log-probs of its learned tokens, and their number."""
        rows = token_rows(batch, {})
        scores = self.forward(rows, sizes, ScoreRequest())
        if scores is None:
            return None
        assert scores.log_probs_T is not None, "a language model returns log-probs"
        mask_T, row_ranges = rows.columns["response_mask"], rows_of(rows)
        sums = row_ranges.sum(torch.where(mask_T, scores.log_probs_T.double().cpu(), 0.0))
        columns = {"sum_log_probs": sums, "num_learned": row_ranges.count(mask_T)}
        return DataProto.from_dict(columns, row_ids=batch.row_ids)

    @register(Dispatch.DATA_PARALLEL, reads=("prompts", "responses"), writes=("greedy_tokens",))
    def predict_sft(self, batch: DataProto, sizes: MicroBatchSizes) -> DataProto | None:
        """Return the model's greedy token at each place of the responses, given the tokens before it."""
        scores = self.forward(token_rows(batch, {}), sizes, ScoreRequest(greedy=True))
        if scores is None:
            return None
        assert scores.greedy_T is not None, "greedy tokens were requested"
        tokens = jagged(scores.greedy_T.int().cpu(), batch.lengths("responses"))
        return DataProto.from_dict({"greedy_tokens": tokens}, row_ids=batch.row_ids)


def likelihood_loss(norm: LossNormalizer, batch: LossInput) -> LossOutput:
    """Return the negative mean log-prob of the response tokens."""
    log_probs_T = batch.scores.log_probs_T
    assert log_probs_T is not None, "a language model returns log-probs"
    loss = norm.aggregate(-log_probs_T, rows_of(batch, log_probs_T.device), batch.columns["response_mask"])
    return LossOutput(loss, {"loss": loss.detach()})
