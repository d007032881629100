"""The two ends of a hop: a worker that has samples, and a worker that reads them."""

from __future__ import annotations

import torch

from mrl.controller import Dispatch, RankInfo, Worker, register
from mrl.protocol import DataProto
from mrl.protocol.columns import Jagged, jagged


class Producer(Worker):
    """Creates its samples in advance, so that only the transfer is timed."""

    def __init__(self, place: RankInfo, lengths: dict[str, list[int]]) -> None:
        super().__init__(place)
        self._samples = {name: _samples(rows) for name, rows in lengths.items()}

    @register(
        Dispatch.DATA_PARALLEL,
        writes=("responses", "response_mask", "rollout_log_probs", "scores"),
    )
    def produce(self, batch: DataProto, name: str) -> DataProto:
        """Return the samples of this name."""
        return DataProto.from_dict(self._samples[name], row_ids=batch.row_ids)


class Consumer(Worker):
    """Reads all six columns."""

    @register(
        Dispatch.DATA_PARALLEL,
        reads=("prompts", "responses", "response_mask", "rollout_log_probs", "scores", "uid"),
    )
    def consume(self, batch: DataProto) -> float:
        """Read every response token and log-prob."""
        return sum(float(batch.values(name).sum()) for name in ("responses", "rollout_log_probs"))


def _samples(lengths: list[int]) -> dict[str, torch.Tensor | Jagged]:
    total = sum(lengths)
    return {
        "responses": jagged(torch.arange(total, dtype=torch.int32), lengths),
        "response_mask": jagged(torch.ones(total, dtype=torch.bool), lengths),
        "rollout_log_probs": jagged(torch.rand(total), lengths),
        "scores": torch.rand(len(lengths)),
    }
