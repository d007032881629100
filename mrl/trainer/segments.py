"""The rows that a step trains on: the samples, and beside each the other segments of its conversation.

A segment is what the model read and wrote behind a context of its own. All segments of a conversation have its score,
which is compared with those of other conversations once: see `WholeBatch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch

from mrl.agents.conversation import Conversation, Ids
from mrl.protocol import DataProto
from mrl.protocol.columns import Jagged, from_rows


@dataclass(frozen=True, eq=False)
class Segment:
    """What is trained on of a conversation that is over."""

    prompt_ids: Ids
    response_ids: Ids
    log_probs: np.ndarray[Any, np.dtype[np.float32]]
    mask: np.ndarray[Any, np.dtype[np.bool_]]
    versions: Ids


def segments_to_json(segments: Sequence[Conversation | Segment]) -> list[list[Any]]:
    """Return segments as lists, with null for the log-prob of a token that nobody drew."""
    return [
        [
            each.prompt_ids.tolist(),
            each.response_ids.tolist(),
            [float(log_prob) if drawn else None for log_prob, drawn in zip(each.log_probs, each.mask, strict=True)],
            each.mask.tolist(),
            each.versions.tolist(),
        ]
        for each in segments
    ]


def segments_from_json(found: Sequence[Sequence[Any]]) -> list[Segment]:
    """Return them again."""
    segments = []
    for prompt_ids, response_ids, log_probs, mask, versions in found:
        numbers = [np.nan if log_prob is None else log_prob for log_prob in log_probs]
        segments.append(
            Segment(
                np.asarray(prompt_ids, np.int32),
                np.asarray(response_ids, np.int32),
                np.asarray(numbers, np.float32),
                np.asarray(mask, np.bool_),
                np.asarray(versions, np.int32),
            )
        )
    return segments


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
    kept = {name: column for name, column in columns.items() if name in samples.columns()}
    return TrainedRows(DataProto.concat([samples, DataProto(kept, row_ids, {})]), [*numbers, *owners])


def _columns(segments: list[Conversation | Segment]) -> dict[str, Jagged]:
    return {
        "prompts": from_rows([torch.tensor(each.prompt_ids) for each in segments]),
        "responses": from_rows([torch.tensor(each.response_ids) for each in segments]),
        "rollout_log_probs": from_rows([torch.tensor(each.log_probs) for each in segments]),
        "response_mask": from_rows([torch.tensor(each.mask) for each in segments]),
        "versions": from_rows([torch.tensor(each.versions) for each in segments]),
    }
