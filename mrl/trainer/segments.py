"""Rows that a step trains on: the samples and the other segments of their conversations.

A segment is a part of a conversation with its own context. All segments of a conversation share its score, which
counts once in comparisons with other conversations: see `WholeBatch`. If segments have roles, each role is compared
with the same role in other conversations, and may have its own score.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch

from mrl.agents.conversation import Conversation
from mrl.algos.role_baselines import RoleBaselines
from mrl.config.algorithm import AlgorithmConfig
from mrl.config.reward import RewardConfig
from mrl.errors import AgentError
from mrl.protocol import DataProto
from mrl.protocol.columns import AnyColumn, from_rows, take
from mrl.rollout.stored_routes import ROUTES, column_of, routes_of
from mrl.trainer.step_metrics import reward_vector
from mrl.workers.messages import WholeBatch

Segment = dict[str, Any]
"""Trained part of a finished conversation: the columns below, for one row, its role, and its routes if engines return
them."""
ROLE, ROLE_SCORES = "role", "role_scores"
"""Columns of samples: role of the segment with the last turn, and score of each role, empty if roles have none."""
_COLUMNS: dict[str, type[np.generic]] = {
    "prompts": np.int32,
    "responses": np.int32,
    "rollout_log_probs": np.float32,
    "response_mask": np.bool_,
    "versions": np.int32,
}


def segment_of(conversation: Conversation) -> Segment:
    columns = (conversation.prompt_ids, conversation.response_ids, conversation.log_probs, conversation.mask)
    segment = dict(zip(_COLUMNS, (*columns, conversation.versions), strict=True)) | {ROLE: conversation.role}
    return segment if conversation.routes is None else {**segment, ROUTES: conversation.routes}


def segments_to_json(segments: Sequence[Segment]) -> list[list[Any]]:
    """Return the segments as lists, with null for the log-probs of tokens that were not drawn. A role is at the end."""
    return [
        [_listed(segment, name) for name in _COLUMNS]
        + ([routes_of(segment[ROUTES]).tolist()] if ROUTES in segment else [])
        + ([segment[ROLE]] if segment[ROLE] else [])
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
    segments = []
    for row in rows:
        values, role = (row[:-1], row[-1]) if isinstance(row[-1], str) else (row, "")
        columns = zip([*kinds][: len(values)], values, strict=True)  # routes may be missing
        segments.append({ROLE: role} | {name: np.array(column, kinds[name]) for name, column in columns})
    return segments


def _routes(routes: Sequence[Any], samples: DataProto) -> AnyColumn:
    """Return the routes of segments in the form of the samples' column: local after a resume, otherwise stored."""
    if ROUTES in samples.stored:
        return column_of(routes)
    kind = samples.values(ROUTES).dtype
    return from_rows([torch.tensor(of_row).to(kind) for of_row in routes])


def trained_rows(samples: DataProto) -> DataProto:
    """Return the samples in order, followed by the other trained segments of their conversations.

    The column `sample` has the number of the sample that each row belongs to. `scores` has the score of the row's role
    if roles have their own, otherwise that of the sample.
    """
    other_segments = list(samples["other_segments"]) if "other_segments" in samples.columns() else []
    owners = [sample for sample, segments in enumerate(other_segments) for _ in segments]
    samples = samples.with_column("sample", torch.arange(len(samples)))
    if not owners:
        return _scored_by_role(samples)
    segments = list(chain(*other_segments))
    columns: dict[str, AnyColumn] = {
        name: from_rows([torch.tensor(segment[name]) for segment in segments]) for name in _COLUMNS
    }
    if ROUTES in samples.columns():
        columns[ROUTES] = _routes([segment[ROUTES] for segment in segments], samples)
    row_ids = samples.row_ids.max() + 1 + np.arange(len(owners))
    columns_of_segments = {
        name: columns[name] if name in columns else take(column, np.array(owners))
        for name, column in samples.columns().items()
    }
    rows = DataProto.concat([samples, DataProto(columns_of_segments, row_ids, {})])
    if ROLE in samples.columns():
        rows = rows.with_column(ROLE, [*samples[ROLE], *(segment[ROLE] for segment in segments)])
    return _scored_by_role(rows)


def rows_of_step(
    samples: DataProto, algorithm: AlgorithmConfig, baselines: RoleBaselines
) -> tuple[DataProto, dict[str, float]]:
    """Return the trained rows, with the baselines of their roles if the advantage has any, and metrics of these."""
    rows = trained_rows(samples)
    if algorithm.advantage != "rae":
        return rows, {}
    return with_role_baselines(rows, baselines, algorithm.rae_decay), baselines.figures()


def _scored_by_role(rows: DataProto) -> DataProto:
    if ROLE_SCORES not in rows.columns() or not any(rows[ROLE_SCORES]):
        return rows
    parts = zip(rows[ROLE_SCORES], rows[ROLE], rows["scores"].tolist(), strict=True)
    scores = [of_roles[role] if of_roles else score for of_roles, role, score in parts]
    return rows.with_column("scores", torch.tensor(scores, dtype=torch.float64))


@dataclass(frozen=True)
class ComparedParts:
    """The parts of conversations that advantages compare: all segments of a role, or all segments without roles."""

    of_row: list[int]
    """Number of the part of each row. Parts are numbered in the order of their first rows."""
    first_rows: list[int]
    """First row of each part."""
    groups: list[str]
    """Name of the group in which each part is compared: its prompt and its role, or its prompt without roles."""

    @classmethod
    def of(cls, rows: DataProto) -> ComparedParts:
        roles, numbers = _roles(rows), dict[tuple[int, str], int]()
        of_row = [numbers.setdefault(key, len(numbers)) for key in zip(rows["sample"].tolist(), roles, strict=True)]
        first_rows = np.unique(of_row, return_index=True)[1].tolist()
        groups = [rows["uid"][row] for row in first_rows]
        if any(roles):
            groups = [json.dumps([uid, roles[row]]) for uid, row in zip(groups, first_rows, strict=True)]
        return cls(of_row, first_rows, groups)


def whole_batch(rows: DataProto, kl_coef: float, reward: RewardConfig) -> WholeBatch:
    """Return what a shard of the rows needs to know about the others."""
    parts = ComparedParts.of(rows)
    return WholeBatch(parts.groups, kl_coef, parts.of_row, reward_vector(rows.take(parts.first_rows), reward))


def _roles(rows: DataProto) -> list[str]:
    return list(rows[ROLE]) if ROLE in rows.columns() else [""] * len(rows)


def with_role_baselines(rows: DataProto, baselines: RoleBaselines, decay: float) -> DataProto:
    """Return the rows with the baseline of their role, after its update with the score of their conversation."""
    roles, parts, values = _roles(rows), ComparedParts.of(rows), dict[int, float]()
    if "" in roles:
        what = f"rae has a baseline for each role, but {roles.count('')} of {len(rows)} rows have no role"
        first = f"first: a conversation of the prompt {rows['uid'][roles.index('')]}"
        fix = 'let its environment begin each segment with Start(messages=..., role="NAME")'
        raise AgentError(f"{what}; {first}", where="algorithm.advantage", fix=f"{fix}, or use algorithm.advantage=grpo")
    for row in sorted(parts.first_rows, key=rows["sample"].tolist().__getitem__):
        score = float(rows["scores"][row])
        values[parts.of_row[row]] = baselines.update(rows["data_source"][row], roles[row], score, decay)
    column = torch.tensor([values[part] for part in parts.of_row], dtype=torch.float64)
    return rows.with_column("baseline_scores", column)


def role_metrics(batch: DataProto) -> dict[str, float]:
    """Return the mean score of each role, over the conversations that have it."""
    by_role: dict[str, list[float]] = {}
    columns = (batch[ROLE], batch["other_segments"], batch[ROLE_SCORES], batch["scores"].tolist())
    for role, segments, of_roles, score in zip(*columns, strict=True):
        for name in {role, *(segment[ROLE] for segment in segments)} - {""}:
            by_role.setdefault(name, []).append(of_roles.get(name, score))
    return {f"agent/role/{role}/score": float(np.mean(by_role[role])) for role in sorted(by_role)}
