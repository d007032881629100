"""A model's workers as the trainer sees them: batches are cut into shards and micro-batches here, and put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mrl.config.schema import MegatronModelConfig
from mrl.controller import RayWorkerGroup
from mrl.data.packing import PackingRules, plan_step
from mrl.protocol import DataProto


class ModelRole:
    """A role's model. Rows go where the work is even; they come back in the batch's own order."""

    def __init__(self, group: RayWorkerGroup, settings: MegatronModelConfig) -> None:
        self.group = group
        self._max_tokens = settings.max_tokens_per_device
        facts = group.init_model()[0]
        self._packing: PackingRules = facts.packing
        self.num_parameters: int = facts.num_parameters
        self.flops_per_token: float = facts.flops_per_token
        self.device: str = facts.device

    @property
    def row_multiple(self) -> int:
        """Any multiple of this many rows of similar length can be spread over the ranks and their micro-batches."""
        return self.group.mesh.dp * self._packing.count_multiple

    def run(self, method: str, batch: DataProto) -> DataProto:
        """The columns that a method of the workers writes for these rows, and what it said beside them."""
        return self._joined(getattr(self.group, method)(*self._cut(batch)))

    def update(self, method: str, batch: DataProto) -> dict[str, float]:
        """One optimizer step on these rows; what the whole update reports."""
        reports = getattr(self.group, method)(*self._cut(batch))
        names = dict.fromkeys(name for report in reports for name in report.parts)
        sums = {name: sum(report.parts.get(name, 0.0) for report in reports) for name in names}
        first = reports[0]
        return sums | {"grad_norm": first.grad_norm, "lr": first.learning_rate, "skipped": float(not first.applied)}

    def evenly(self, method: str, batch: DataProto, *arguments: Any) -> DataProto:
        """The same for a method that runs no model: rows are cut evenly, without micro-batches."""
        return self._joined(getattr(self.group, method)(batch, *arguments))

    @staticmethod
    def _joined(written: DataProto) -> DataProto:
        written.meta_info = {name: said[0] for name, said in written.meta_info.items()}  # alike on every shard
        return written

    def _cut(self, batch: DataProto) -> tuple[list[DataProto], list[list[int]]]:
        lengths = batch.lengths("prompts").astype(np.int64) + batch.lengths("responses")
        plan = plan_step(lengths, self.group.mesh.dp, self._max_tokens, self._packing)
        shards = [batch.take(np.concatenate(batches)) for batches in plan.micro_batches]
        return shards, [[len(rows) for rows in batches] for batches in plan.micro_batches]


def mean_of(updates: Sequence[dict[str, float]], prefix: str) -> dict[str, Any]:
    """The figures of several updates as one: means, but for the updates that were skipped, which are counted."""
    figures = {
        f"{prefix}/{name}": float(np.mean([update[name] for update in updates]))
        for name in (updates[0] if updates else {})
    }
    if updates:
        figures[f"{prefix}/skipped"] = sum(update["skipped"] for update in updates)
    return figures
