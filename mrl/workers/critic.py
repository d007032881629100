"""`CriticWorker`: a rank of the value model."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from mrl.algos.aggregate import LossNormalizer
from mrl.algos.losses import ValueTokens
from mrl.algos.objectives import critic_objective
from mrl.config import step_calls
from mrl.config.algorithm import AlgorithmConfig
from mrl.controller import RankInfo, register_call
from mrl.engine.scores import LossInput, LossOutput, ScoreRequest
from mrl.protocol import DataProto
from mrl.workers.advantages import shard_advantages
from mrl.workers.messages import MicroBatchSizes, ModelFacts, ModelSetup, UpdateReport, WholeBatch
from mrl.workers.model_worker import ModelWorker, load_model, optional_values, response_column, rows_of, token_rows
from mrl.workers.strategies import make_engine

if TYPE_CHECKING:
    from mrl.engine.engine import MegatronEngine


class CriticWorker(ModelWorker):
    def __init__(self, place: RankInfo, setup: ModelSetup, algorithm: AlgorithmConfig, horizon_tokens: int) -> None:
        super().__init__(place, setup)
        self._algorithm = algorithm
        self._horizon_tokens = algorithm.loss.horizon_tokens or horizon_tokens

    def init_on(self, actor: MegatronEngine) -> ModelFacts:
        """Use the frozen model of the actor, in the same process."""
        return load_model(self, make_engine(self.setup, actor.groups, actor))

    @register_call(step_calls.VALUES)
    def compute_values(self, batch: DataProto, sizes: MicroBatchSizes) -> DataProto | None:
        """Compute the value of the state before each response token."""
        scores = self.forward(token_rows(batch, {}), sizes, ScoreRequest())
        return response_column(batch, "values", None if scores is None else scores.values_T)

    @register_call(step_calls.CRITIC_ADVANTAGES)
    def compute_advantages(self, batch: DataProto, whole: WholeBatch) -> DataProto:
        """Compute advantages, and the returns that are the critic's targets."""
        return shard_advantages(batch, whole, self._algorithm, self.sum_over_shards, self.max_over_shards)

    @register_call(step_calls.UPDATE_CRITIC)
    def update_critic(self, batch: DataProto, sizes: MicroBatchSizes) -> UpdateReport:
        rows = token_rows(batch, optional_values(batch, "values", "returns"))
        mode, mask_T = self._algorithm.loss.aggregation, rows.columns["response_mask"]
        norm = LossNormalizer.of(mode, rows_of(rows), mask_T, self._horizon_tokens, self.sum_over_shards)
        loss = partial(value_loss, self._algorithm.loss.value_clip, norm)
        return self.update(rows, sizes, loss, ScoreRequest())


def value_loss(clip: float | None, norm: LossNormalizer, batch: LossInput) -> LossOutput:
    values_T, columns = batch.scores.values_T, batch.columns
    assert values_T is not None, "a critic returns values"
    tokens = ValueTokens(columns["response_mask"], values_T, columns["values"], columns["returns"])
    objective = critic_objective(tokens, rows_of(batch, values_T.device), norm, clip)
    return LossOutput(objective.loss, {"loss": objective.loss.detach()} | objective.reports)
