"""Rows that a step trains on: the samples and the other segments of their conversations.

A segment is a part of a conversation with its own context. All segments of a conversation share its score, which
counts once in comparisons with other conversations: see `WholeBatch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from mrl.agents.conversation import Conversation
from mrl.protocol import DataProto
from mrl.protocol.columns import AnyColumn, from_rows
from mrl.rollout.stored_routes import ROUTES, column_of, routes_of

Segment = dict[str, Any]
"""Trained part of a finished conversation: the columns below, for one row, and its routes if engines return them."""
_COLUMNS: dict[str, type[np.generic]] = {
    "prompts": np.int32,
    "responses": np.int32,
    "rollout_log_probs": np.float32,
    "response_mask": np.bool_,
    "versions": np.int32,
}


def segment_of(conversation: Conversation) -> Segment:
    columns = (conversation.prompt_ids, conversation.response_ids, conversation.log_probs, conversation.mask)
    segment = dict(zip(_COLUMNS, (*columns, conversation.versions), strict=True))
    return segment if conversation.routes is None else {**segment, ROUTES: conversation.routes}


def segments_to_json(segments: Sequence[Segment]) -> list[list[Any]]:
    """Return the segments as lists, with null for the log-probs of tokens that were not drawn."""
    return [
        [_listed(segment, name) for name in _COLUMNS]
        + ([routes_of(segment[ROUTES]).tolist()] if ROUTES in segment else [])
        for segment in segments
    ]


def _listed(segment: Segment, name: str) -> list[Any]:
    values = segment[name]
    if name == "rollout_log_probs":
        drawn = zip(values.tolist(), segment["response_mask"], strict=True)
        return [log_prob if is_drawn else None for log_prob, is_drawn in drawn]
    listed: list[Any] = values.tolist()
    return listed


def segments_from_json(rows: Sequence[Sequence[Any]]) -> list[Segment]:
    kinds: dict[str, type[np.generic]] = {**_COLUMNS, ROUTES: np.int16}
    return [
        {name: np.array(values, kinds[name]) for name, values in zip([*kinds][: len(row)], row, strict=True)}
        for row in rows
    ]


def _routes(routes: Sequence[Any], samples: DataProto) -> AnyColumn:
    """Return the routes of segments in the form of the samples' column: local after a resume, otherwise stored."""
    if ROUTES in samples.stored:
        return column_of(routes)
    kind = samples.values(ROUTES).dtype
    return from_rows([torch.tensor(of_row).to(kind) for of_row in routes])


def trained_rows(samples: DataProto) -> DataProto:
    """Return the samples in order, followed by the other trained segments of their conversations.

    The column `sample` has the number of the sample that each row belongs to.
    """
    other_segments = list(samples["other_segments"]) if "other_segments" in samples.columns() else []
    owners = [sample for sample, segments in enumerate(other_segments) for _ in segments]
    samples = samples.with_column("sample", torch.arange(len(samples)))
    if not owners:
        return samples
    segments = list(chain(*other_segments))
    columns: dict[str, AnyColumn] = {
        name: from_rows([torch.tensor(segment[name]) for segment in segments]) for name in _COLUMNS
    }
    if ROUTES in samples.columns():
        columns[ROUTES] = _routes([segment[ROUTES] for segment in segments], samples)
    row_ids = samples.row_ids.max() + 1 + np.arange(len(owners))
    columns_of_segments = {name: columns.get(name, column) for name, column in samples.take(owners).columns().items()}
    return DataProto.concat([samples, DataProto(columns_of_segments, row_ids, {})])
