"""Ranks of frozen models: `ReferenceWorker`, `TeacherWorker` and `RewardModelWorker`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mrl.algos.kl import UNTAUGHT
from mrl.config import step_calls
from mrl.controller import Dispatch, RankInfo, register, register_call
from mrl.engine.scores import ScoreRequest
from mrl.protocol import DataProto
from mrl.protocol.columns import jagged
from mrl.workers.messages import MicroBatchSizes, ModelSetup
from mrl.workers.model_worker import (
    ModelWorker,
    last_tokens,
    optional_values,
    response_column,
    score_column,
    token_rows,
)


class ReferenceWorker(ModelWorker):
    """Holds the policy before training, if the actor keeps no copy of it."""

    def __init__(self, place: RankInfo, setup: ModelSetup, temperature: float) -> None:
        super().__init__(place, setup)
        self._temperature = temperature

    @register_call(step_calls.REFERENCE_LOG_PROB)
    def compute_ref_log_prob(self, batch: DataProto, sizes: MicroBatchSizes) -> DataProto | None:
        request = ScoreRequest(self._temperature, vocab=self.setup.vocab)
        scores = self.forward(token_rows(batch, {}), sizes, request)
        return None if scores is None else response_column(batch, "ref_log_probs", scores.log_probs_T)


class ScoresAsTeacher(ModelWorker):
    """Scores responses as a teacher, which reads the policy's token ids. The policy may be its own teacher."""

    _temperature: float
    _top_k: int

    @register_call(step_calls.TEACHER_LOG_PROB)
    def compute_teacher_log_prob(self, batch: DataProto, sizes: MicroBatchSizes) -> DataProto | None:
        return self._taught(batch, sizes)

    @register_call(step_calls.TEACHER_TOP_K)
    def compute_teacher_top_k(self, batch: DataProto, sizes: MicroBatchSizes) -> DataProto | None:
        """Compute also the likeliest tokens at each place, with their log-probs and that of all others."""
        return self._taught(batch, sizes, top_k=self._top_k)

    def _taught(
        self, batch: DataProto, sizes: MicroBatchSizes, *, top_k: int = 0, hidden: bool = False
    ) -> DataProto | None:
        request = ScoreRequest(self._temperature, vocab=self.setup.vocab, top_k=top_k, hidden=hidden)
        scores = self.forward(token_rows(batch, {}), sizes, request)
        if scores is None:
            return None
        columns: dict[str, Tensor | None] = {
            "teacher_log_probs": scores.log_probs_T,
            "teacher_top_ids": None if scores.top_ids_TK is None else scores.top_ids_TK.int(),
            "teacher_top_log_probs": scores.top_log_probs_TK,
            "teacher_hidden": scores.hidden_TH,
        }
        lengths = batch.lengths("responses")
        present = {name: jagged(x.cpu(), lengths) for name, x in columns.items() if x is not None}
        return DataProto.from_dict(present, row_ids=batch.row_ids)


class TeacherWorker(ScoresAsTeacher):
    """Tokens that the policy does not have get no probability."""

    def __init__(self, place: RankInfo, setup: ModelSetup, top_k: int, temperature: float) -> None:
        super().__init__(place, setup)
        self._top_k, self._temperature = top_k, temperature

    @register_call(step_calls.TEACHER_HIDDEN)
    def compute_teacher_hidden(self, batch: DataProto, sizes: MicroBatchSizes) -> DataProto | None:
        """Compute also the hidden states, from which all log-probs follow."""
        return self._taught(batch, sizes, hidden=True)

    @register(Dispatch.DATA_PARALLEL, reads=("prompts", "responses"), writes=("teacher_log_probs",))
    def compute_own_log_prob(self, batch: DataProto, sizes: MicroBatchSizes) -> DataProto | None:
        """Compute log-probs of the teacher's own tokens, which `trainer/text_teacher.py` has made of the responses."""
        scores = self.forward(token_rows(batch, {}), sizes, ScoreRequest(self._temperature))
        return None if scores is None else response_column(batch, "teacher_log_probs", scores.log_probs_T)


def teacher_values(batch: DataProto, *, only_some: bool) -> dict[str, Tensor]:
    """Return the teacher's columns of these rows, if they have any.

    If only some rows have a teacher, the column `taught` marks their tokens. All others get values that mean nothing:
    zeros, and distinct token ids, so that divergences stay finite. With another tokenizer, the spans mark them.
    """
    columns = optional_values(batch, *step_calls.TEACHER_COLUMNS, step_calls.TEACHER_SPANS)
    if (spans_T := columns.get(step_calls.TEACHER_SPANS)) is not None:
        return columns | {"taught": spans_T != UNTAUGHT}
    if not only_some or not columns:
        return columns
    taught_T = torch.from_numpy(np.repeat(batch.lengths("teacher_log_probs") > 0, batch.lengths("responses")))
    whole = {name: values.new_zeros(len(taught_T), *values.shape[1:]) for name, values in columns.items()}
    for name, values in columns.items():
        if name == "teacher_top_ids":
            whole[name][:] = torch.arange(values.shape[1])
        whole[name][taught_T] = values
    return whole | {"taught": taught_T}


class RewardModelWorker(ModelWorker):
    @register_call(step_calls.RM_SCORE)
    def compute_rm_score(self, batch: DataProto, sizes: MicroBatchSizes) -> DataProto | None:
        return score_column(batch, "rm_scores", self.forward(last_tokens(batch), sizes, ScoreRequest()))
