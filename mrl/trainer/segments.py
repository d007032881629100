"""The rows that a step trains on: the samples, and beside each the other segments of its conversation.

A segment is what the model read and wrote behind a context of its own. All segments of a conversation have its score,
which is compared with those of other conversations once: see `WholeBatch`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from mrl.agents.conversation import Conversation
from mrl.protocol import DataProto
from mrl.protocol.columns import Jagged, from_rows


@dataclass(frozen=True)
class TrainedRows:
    """The samples in their order, and behind them what else of their conversations is trained on."""

    batch: DataProto
    sample_of_row: list[int]
    """The number of the sample that each row is of."""


def trained_rows(samples: DataProto) -> TrainedRows:
    """Return a row for each segment of the samples."""
    others = list(samples["other_segments"]) if "other_segments" in samples.columns() else []
    owners = [sample for sample, segments in enumerate(others) for _ in segments]
    numbers = list(range(len(samples)))
    if not owners:
        return TrainedRows(samples, numbers)
    row_ids = samples.row_ids.max() + 1 + np.arange(len(owners))
    columns = samples.take(owners).columns() | _columns(list(chain(*others)))
    return TrainedRows(DataProto.concat([samples, DataProto(columns, row_ids, {})]), [*numbers, *owners])


def _columns(segments: list[Conversation]) -> dict[str, Jagged]:
    return {
        "prompts": from_rows([torch.tensor(each.prompt_ids) for each in segments]),
        "responses": from_rows([torch.tensor(each.response_ids) for each in segments]),
        "rollout_log_probs": from_rows([torch.tensor(each.log_probs) for each in segments]),
        "response_mask": from_rows([torch.tensor(each.mask) for each in segments]),
    }
