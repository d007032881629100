"""The trainer's clients of the models' workers: they cut batches into equal work and merge the results.

Each method has the name of the method in `mrl/workers`: `ActorClient` calls `ActorRolloutRefWorker`, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mrl.config import step_calls
from mrl.config.schema import MegatronModelConfig
from mrl.config.step_calls import StepCall
from mrl.controller import RayWorkerGroup
from mrl.data.packing import PackingRules, plan_step
from mrl.protocol import DataProto
from mrl.protocol.columns import Index
from mrl.protocol.step_record import RankRecord
from mrl.rounding import round_up
from mrl.trainer.device_turns import DeviceTurns
from mrl.workers.messages import UpdateReport, WholeBatch

Metrics = dict[str, float]


class RoleClient:
    """Calls one role's workers.

    Rows are distributed evenly by work; results come back in any order, with their row ids.
    """

    _takes_turns = True

    def __init__(self, group: RayWorkerGroup, settings: MegatronModelConfig, turns: DeviceTurns | None = None) -> None:
        """Load the model. Without `turns`, the role does not share its devices."""
        self.group, self._turns = group, turns
        self._max_tokens = settings.max_tokens_per_device
        facts = group.init_model()[0]
        self._packing: PackingRules = facts.packing
        self.num_parameters: int = facts.num_parameters
        self.flops_per_token: float = facts.flops_per_token
        self.device: str = facts.device
        self._packed: tuple[list[Index], list[list[int]]] = [], []

    @property
    def row_multiple(self) -> int:
        """Number of rows of similar length whose multiples can be spread over the ranks and their micro-batches."""
        return self.group.mesh.dp * self._packing.count_multiple

    @property
    def capacity(self) -> int:
        """Number of tokens in a micro-batch, which also limits the longest row."""
        return self._packing.capacity(self._max_tokens)

    @property
    def longest_row(self) -> int:
        """Number of tokens in the longest row that fits into a micro-batch."""
        return self.capacity // self._packing.row_multiple * self._packing.row_multiple

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call the workers, as part of this role's turn on their devices."""
        if self._turns is not None and self._takes_turns:
            self._turns.begin(self.group)
        return getattr(self.group, method)(*arguments)

    def _forward(self, call: StepCall, batch: DataProto, prefix: str = "") -> tuple[DataProto, Metrics]:
        """Return the columns that the model writes for these rows, and the metrics."""
        return _merged(self._call(call.method, *self._shards(batch)), prefix)

    @property
    def micro_batches(self) -> list[list[list[int]]]:
        """Row ids of the last update, by data-parallel rank and micro-batch."""
        ranks = zip(*self._packed, strict=True)
        return [[part.tolist() for part in np.split(ids, np.cumsum(sizes)[:-1])] for ids, sizes in ranks]

    def record(self, method: str, *arguments: Any) -> list[RankRecord]:
        """Call a method of `RecordedWorker` on all ranks."""
        records: list[RankRecord] = self._call(method, *arguments)
        return records

    def compute_advantages(self, batch: DataProto, whole: WholeBatch) -> tuple[DataProto, Metrics]:
        """Return the advantages and metrics about them. No model runs, so rows are cut by number."""
        return _merged(self.group.compute_advantages(batch, whole))

    def score(self, method: str, batch: DataProto) -> DataProto:
        """Return the rows, in any number, with the columns that a method writes.

        Rows are repeated if a rank would have none.
        """
        num = round_up(len(batch), self.row_multiple)
        num_copies = -(-num // len(batch))
        by_copy = np.arange(num_copies * len(batch)).reshape(-1, num_copies).T.ravel()  # all rows once, then all again
        padded = batch.repeat(num_copies).take(by_copy[:num])
        columns, _ = _merged(self._call(method, *self._shards(padded)))
        return DataProto(padded.union(columns).take(np.arange(len(batch))).columns(), batch.row_ids, {})

    def _update(self, method: str, shards: list[DataProto], sizes: list[list[int]]) -> Metrics:
        reports: list[UpdateReport] = self._call(method, shards, sizes)
        self._packed = [shard.row_ids for shard in shards], sizes
        names = dict.fromkeys(name for report in reports for name in report.parts)
        sums = {name: sum(report.parts.get(name, 0.0) for report in reports) for name in names}
        first = reports[0]
        of_step = {"grad_norm": first.grad_norm, "lr": first.learning_rate, "skipped": float(not first.applied)}
        return sums | of_step | first.expert_load

    def _shards(
        self, batch: DataProto, groups: npt.NDArray[np.int64] | None = None
    ) -> tuple[list[DataProto], list[list[int]]]:
        """Cut a batch into one shard per data-parallel rank. Return the shards and the sizes of their micro-batches."""
        lengths = batch.lengths("prompts").astype(np.int64) + batch.lengths("responses")
        plan = plan_step(lengths, self.group.mesh.dp, self._max_tokens, self._packing, groups)
        shards = [batch.take(np.concatenate(batches)) for batches in plan]
        return shards, [[len(rows) for rows in batches] for batches in plan]


class ReferenceClient(RoleClient):
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """Return `ref_log_probs` of the policy before training."""
        return self._forward(step_calls.REFERENCE_LOG_PROB, batch)[0]


class ActorClient(RoleClient):
    def compute_log_prob(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        """Return `old_log_probs` of the current policy, and the engines' distance from them."""
        return self._forward(step_calls.LOG_PROB, batch, "mismatch")

    def compute_log_prob_with_norms(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        """Also return the squared norm of each token's score."""
        return self._forward(step_calls.LOG_PROB_WITH_NORMS, batch, "mismatch")

    def compute_log_prob_with_routes(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        """Do the same, and return also the experts that the policy chose for each token."""
        return self._forward(step_calls.LOG_PROB_WITH_ROUTES, batch, "mismatch")

    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """Return `ref_log_probs` of the policy before training."""
        return self._forward(step_calls.REF_LOG_PROB, batch)[0]

    def update_actor(self, batch: DataProto) -> Metrics:
        return self._update(step_calls.UPDATE_ACTOR.method, *self._shards(batch))


class CriticClient(RoleClient):
    def compute_values(self, batch: DataProto) -> DataProto:
        """Return `values` of the states before each response token."""
        return self._forward(step_calls.VALUES, batch)[0]

    def update_critic(self, batch: DataProto) -> Metrics:
        return self._update(step_calls.UPDATE_CRITIC.method, *self._shards(batch))


class RewardModelClient(RoleClient):
    """Client for scoring during a rollout, in another thread than the other roles' turns: each turn ends at once."""

    _takes_turns = False

    def compute_rm_score(self, batch: DataProto) -> DataProto:
        """Return `rm_scores` of the responses, in order."""
        scores = self.score(step_calls.RM_SCORE.method, batch).select(*step_calls.RM_SCORE.writes)
        if self._turns is not None and self._turns.shares(self.group.role):
            self.group.give_back()
        return scores


class TeacherClient(RoleClient):
    """Client of one teacher, which may get any number of a step's rows (`mrl.trainer.teachers`)."""


class SupervisedClient(RoleClient):
    def score_groups(self, method: str, batch: DataProto) -> DataProto:
        """Return the rows with the columns that a method writes, using the micro-batches of an update on them."""
        columns, _ = _merged(self._call(method, *self._shards(batch, group_sizes(batch))))
        return batch.union(columns)

    def update(self, method: str, batch: DataProto) -> Metrics:
        shards, sizes = self._shards(batch, group_sizes(batch))
        num = sum(map(len, sizes))
        tokens = int(batch.lengths("prompts").sum() + batch.lengths("responses").sum()) / num
        packing = {"micro_batches": num, "tokens": tokens, "fill": tokens / self.capacity}
        metrics = self._update(method, shards, sizes)
        return metrics | {f"packing/{name}": float(value) for name, value in packing.items()}


def group_sizes(batch: DataProto) -> npt.NDArray[np.int64] | None:
    """Return the number of rows in each consecutive group; None if rows are not grouped."""
    if "rank" not in batch.columns():
        return None
    (starts,) = (batch["rank"] == 0).numpy().nonzero()
    return np.diff(starts, append=len(batch))


def _merged(written: DataProto, prefix: str = "") -> tuple[DataProto, Metrics]:
    start = f"{prefix}/" if prefix else ""
    metrics = {f"{start}{name}": values[0] for name, values in written.meta_info.items()}  # equal on all shards
    written.meta_info = {}
    return written, metrics


def mean_of(updates: Sequence[Metrics], prefix: str) -> dict[str, Any]:
    """Return the mean of several updates' metrics, with the number of skipped updates."""
    metrics = {
        f"{prefix}/{name}": float(np.mean([update[name] for update in updates]))
        for name in (updates[0] if updates else {})
    }
    if updates:
        metrics[f"{prefix}/skipped"] = sum(update["skipped"] for update in updates)
    return metrics
