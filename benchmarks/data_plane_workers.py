"""The two ends of a hop: a worker that has samples, a worker that reads them, and their padded counterparts."""

from __future__ import annotations

import torch
from tensordict import TensorDict

from mrl.controller import Dispatch, Place, Worker, register
from mrl.protocol import DataProto
from mrl.protocol.columns import jagged, values_of

LONGEST_RESPONSE = 8192


class Producer(Worker):
    """Has made its samples beforehand: only handing them over is timed."""

    def __init__(self, place: Place, lengths: dict[str, list[int]]) -> None:
        super().__init__(place)
        self._samples = {name: _samples(rows) for name, rows in lengths.items()}

    @register(
        Dispatch.DATA_PARALLEL,
        reads=("prompts",),
        writes=("responses", "response_mask", "rollout_log_probs", "scores"),
    )
    def produce(self, batch: DataProto, name: str) -> DataProto:
        """Hand over the samples of that name."""
        return DataProto.from_dict(self._samples[name], row_ids=batch.row_ids)


class Consumer(Worker):
    """Reads all six columns."""

    @register(
        Dispatch.DATA_PARALLEL,
        reads=("prompts", "responses", "response_mask", "rollout_log_probs", "scores", "uid"),
    )
    def consume(self, batch: DataProto) -> float:
        """Touch every token and log-prob."""
        return sum(float(values_of(batch[name]).sum()) for name in ("prompts", "responses", "rollout_log_probs"))


class PaddedEnd:
    """Either end of the padded hop. Ray serialises the TensorDict, that is, pickles it."""

    def make(self, lengths: list[int], prompt_tokens: int) -> int:
        """The columns of a padded trainer for the same samples, in its types; their bytes."""
        count, width = len(lengths), prompt_tokens + LONGEST_RESPONSE
        whole, response = (count, width), (count, LONGEST_RESPONSE)
        self.rows = TensorDict(
            {
                "prompts": torch.zeros(count, prompt_tokens, dtype=torch.int64),
                "responses": torch.zeros(response, dtype=torch.int64),
                "input_ids": torch.zeros(whole, dtype=torch.int64),
                "attention_mask": torch.ones(whole, dtype=torch.int64),
                "position_ids": torch.zeros(whole, dtype=torch.int64),
                "response_mask": torch.ones(response, dtype=torch.int64),
                "rollout_log_probs": torch.rand(response),
                "token_level_scores": torch.zeros(response),
            },
            batch_size=[count],
        )
        return sum(int(column.nbytes) for column in self.rows.values())

    def produce(self) -> TensorDict:
        """Hand over the rows."""
        return self.rows

    def consume(self, rows: TensorDict) -> float:
        """Touch every token and log-prob."""
        return sum(float(rows[name].sum()) for name in ("prompts", "responses", "rollout_log_probs"))


def _samples(lengths: list[int]) -> dict[str, torch.Tensor]:
    total = sum(lengths)
    return {
        "responses": jagged(torch.arange(total, dtype=torch.int32), lengths),
        "response_mask": jagged(torch.ones(total, dtype=torch.bool), lengths),
        "rollout_log_probs": jagged(torch.rand(total), lengths),
        "scores": torch.rand(len(lengths)),
    }
