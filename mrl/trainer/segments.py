"""The rows that a step trains on: the samples, and beside each the other segments of its conversation.

A segment is what the model read and wrote behind a context of its own. All segments of a conversation have its score,
which is compared with those of other conversations once: see `WholeBatch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from mrl.agents.conversation import Conversation
from mrl.protocol import DataProto
from mrl.protocol.columns import from_rows

Segment = dict[str, np.ndarray[Any, Any]]
"""What is trained on of a conversation that is over: the columns below, for one row."""
_COLUMNS: dict[str, type[np.generic]] = {
    "prompts": np.int32,
    "responses": np.int32,
    "rollout_log_probs": np.float32,
    "response_mask": np.bool_,
    "versions": np.int32,
}


def segment_of(conversation: Conversation) -> Segment:
    found = (conversation.prompt_ids, conversation.response_ids, conversation.log_probs, conversation.mask)
    return dict(zip(_COLUMNS, (*found, conversation.versions), strict=True))


def segments_to_json(segments: Sequence[Segment]) -> list[list[Any]]:
    """Return segments as lists, with null for the log-prob of a token that nobody drew."""
    return [[_listed(each, name) for name in _COLUMNS] for each in segments]


def _listed(segment: Segment, name: str) -> list[Any]:
    values = segment[name]
    if name == "rollout_log_probs":
        drawn = zip(values.tolist(), segment["response_mask"], strict=True)
        return [log_prob if is_drawn else None for log_prob, is_drawn in drawn]
    found: list[Any] = values.tolist()
    return found


def segments_from_json(found: Sequence[Sequence[Any]]) -> list[Segment]:
    return [
        {name: np.array(values, _COLUMNS[name]) for name, values in zip(_COLUMNS, each, strict=True)} for each in found
    ]


def trained_rows(samples: DataProto) -> DataProto:
    """Return the samples in their order, and behind them what else of their conversations is trained on.

    The column `sample` has the number of the sample that each row is of.
    """
    others = list(samples["other_segments"]) if "other_segments" in samples.columns() else []
    owners = [sample for sample, segments in enumerate(others) for _ in segments]
    samples = samples.with_column("sample", torch.arange(len(samples)))
    if not owners:
        return samples
    segments = list(chain(*others))
    columns = {name: from_rows([torch.tensor(each[name]) for each in segments]) for name in _COLUMNS}
    row_ids = samples.row_ids.max() + 1 + np.arange(len(owners))
    kept = {name: columns.get(name, column) for name, column in samples.take(owners).columns().items()}
    return DataProto.concat([samples, DataProto(kept, row_ids, {})])
