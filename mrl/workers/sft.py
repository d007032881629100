"""`SftWorker`: a rank of a model that learns to say what the data says."""

from __future__ import annotations

from functools import partial

import torch

from mrl.algos.aggregate import BatchTotals, LossNormalizer
from mrl.algos.rows import Rows
from mrl.controller import Dispatch, register
from mrl.engine.scores import LossInput, LossOutput, ScoreRequest
from mrl.protocol import DataProto
from mrl.protocol.columns import jagged
from mrl.workers.messages import MicroBatchSizes, UpdateReport
from mrl.workers.model_worker import ModelWorker, token_rows


class SftWorker(ModelWorker):
    @register(Dispatch.DATA_PARALLEL, reads=("prompts", "responses"), optional=("response_mask",))
    def update_sft(self, batch: DataProto, sizes: MicroBatchSizes) -> UpdateReport:
        """Make one optimizer step towards these responses; prompts are read and not learned."""
        rows = token_rows(batch, {})
        mask_T = rows.columns["response_mask"]
        totals = BatchTotals.of(Rows.of(torch.from_numpy(rows.response_lengths)), mask_T, self.sum_over_shards)
        return self.update(rows, sizes, partial(likelihood_loss, LossNormalizer("token-mean", totals)), ScoreRequest())

    @register(
        Dispatch.DATA_PARALLEL,
        reads=("prompts", "responses"),
        optional=("response_mask",),
        writes=("sum_log_probs", "num_learned"),
    )
    def score_sft(self, batch: DataProto, sizes: MicroBatchSizes) -> DataProto | None:
        """Return what the loss of each row is made of: the log-probs of its learned tokens, added up, and their
        number."""
        rows = token_rows(batch, {})
        scores = self.forward(rows, sizes, ScoreRequest())
        if scores is None:
            return None
        assert scores.log_probs_T is not None, "a language model gives log-probs"
        mask_T, lengths = rows.columns["response_mask"], rows.response_lengths.tolist()
        learned_T = torch.where(mask_T, scores.log_probs_T.double().cpu(), 0.0)
        sums, nums = (torch.stack([x.sum() for x in torch.split(x_T, lengths)]) for x_T in (learned_T, mask_T))
        return DataProto.from_dict({"sum_log_probs": sums, "num_learned": nums}, row_ids=batch.row_ids)

    @register(Dispatch.DATA_PARALLEL, reads=("prompts", "responses"), writes=("greedy_tokens",))
    def predict_sft(self, batch: DataProto, sizes: MicroBatchSizes) -> DataProto | None:
        """Return which token the model would have put at each place of the responses, behind the tokens before it."""
        scores = self.forward(token_rows(batch, {}), sizes, ScoreRequest(greedy=True))
        if scores is None:
            return None
        assert scores.greedy_T is not None, "they were asked for"
        tokens = jagged(scores.greedy_T.int().cpu(), batch.lengths("responses"))
        return DataProto.from_dict({"greedy_tokens": tokens}, row_ids=batch.row_ids)


def likelihood_loss(norm: LossNormalizer, batch: LossInput) -> LossOutput:
    """Return minus the mean log-prob of the response tokens."""
    log_probs_T = batch.scores.log_probs_T
    assert log_probs_T is not None, "a language model gives log-probs"
    rows = Rows.of(torch.from_numpy(batch.response_lengths), log_probs_T.device)
    loss = norm.aggregate(-log_probs_T, rows, batch.columns["response_mask"])
    return LossOutput(loss, {"loss": loss.detach()})
