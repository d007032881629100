"""`RewardModelWorker`: a rank of the frozen model that scores responses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mrl.config import step_calls
from mrl.controller import register_call
from mrl.engine.scores import ScoreRequest
from mrl.protocol import DataProto
from mrl.workers.messages import MicroBatchSizes
from mrl.workers.model_worker import ModelWorker, token_rows


class RewardModelWorker(ModelWorker):
    @register_call(step_calls.RM_SCORE)
    def compute_rm_score(self, batch: DataProto, sizes: MicroBatchSizes) -> DataProto | None:
        """Compute the score of each response, which is the head's output at its last token."""
        whole = token_rows(batch, {})
        rows = replace(whole, response_lengths=np.ones_like(whole.response_lengths), columns={}, before=False)
        scores = self.forward(rows, sizes, ScoreRequest())
        if scores is None:
            return None
        assert scores.values_T is not None, "a score head gives values"
        return DataProto.from_dict({"rm_scores": scores.values_T.float().cpu()}, row_ids=batch.row_ids)
