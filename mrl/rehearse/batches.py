"""Batches of the largest or of given lengths, with every column that a call reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mrl.config.arithmetic import longest_sample_tokens, role_batch
from mrl.config.sft import AnyConfig, RankedConfig, SftConfig
from mrl.protocol import DataProto
from mrl.protocol.columns import jagged

_FLOATS = (
    "advantages",
    "returns",
    "values",
    "old_log_probs",
    "ref_log_probs",
    "rollout_log_probs",
    "teacher_log_probs",
)


@dataclass(frozen=True)
class RowLengths:
    """Lengths of a prompt and its response."""

    prompt: int
    response: int


MicroBatches = list[list[RowLengths]]


def largest(config: AnyConfig, role: str) -> list[RowLengths]:
    """Return a full micro-batch in which as many tokens as possible are scored: rows of the longest response."""
    limits = config.batch if isinstance(config, SftConfig) else config.rollout
    longest = min(longest_sample_tokens(limits), limits.max_response_tokens + 1)
    full, rest = divmod(role_batch(config, role).tokens_per_micro_batch, longest)
    rows = [RowLengths(1, longest - 1)] * full + [RowLengths(1, rest - 1)] * (rest > 1)
    if isinstance(config, RankedConfig) and config.is_of_pairs() and len(rows) % 2:  # both responses of a pair
        rows = [*rows[:-1], *_halves(rows[-1])]
    return rows


def smallest(rows: list[RowLengths]) -> list[RowLengths]:
    """Return a part of a micro-batch: the last row, or the last pair."""
    return rows[-2:]


def half(rows: list[RowLengths]) -> list[RowLengths]:
    """Return rows of half the tokens."""
    return [RowLengths(-(-row.prompt // 2), max(row.response // 2, 1)) for row in rows]


def num_tokens(rows: list[RowLengths]) -> int:
    return sum(row.prompt + row.response for row in rows)


def num_micro_batches(config: AnyConfig, role: str, stage: int) -> int:
    """Return as many micro-batches as a stage keeps for backward at a time, but no more than an update has."""
    layout = config.model_roles()[role].parallel
    if layout.vpp == 1:
        return min(layout.pp - stage + 1, max(role_batch(config, role).max_micro_batches, 1))
    chunks = 2 * (layout.pp - stage - 1) + (layout.vpp - 1) * layout.pp + 1
    return layout.pp * -(-chunks // (layout.vpp * layout.pp))


def _halves(row: RowLengths) -> tuple[RowLengths, RowLengths]:
    half = row.response // 2
    return RowLengths(1, half), RowLengths(1, row.response - half - 1)


def batch_of(
    micro_batches: Sequence[Sequence[RowLengths]], columns: Sequence[str], vocab: int, widths: Mapping[str, int]
) -> DataProto:
    """Return a batch with these rows and columns. Tokens are drawn, and floats have no contents.

    `widths` has the numbers per token of columns that have several.
    """
    rows = [row for part in micro_batches for row in part]
    prompts, responses = (np.array([getattr(row, name) for row in rows]) for name in ("prompt", "response"))
    total = int(responses.sum())
    made: dict[str, Any] = {
        "prompts": jagged(_tokens(prompts, vocab), prompts),
        "responses": jagged(_tokens(responses, vocab), responses),
    }
    for name in set(columns) & set(_FLOATS):
        made[name] = jagged(torch.empty(total), responses)
    for name in set(columns) & widths.keys():
        shape = (total, widths[name])
        values = torch.randint(0, vocab, shape) if name.endswith("_ids") else torch.empty(shape)
        made[name] = jagged(values, responses)
    if "rank" in columns:
        made["rank"] = torch.arange(len(rows)) % 2
    if "label" in columns:
        made["label"] = torch.empty(len(rows))
    return DataProto.from_dict(made)


def _tokens(lengths: npt.NDArray[np.int64], vocab: int) -> Tensor:
    return torch.randint(0, vocab, (int(lengths.sum()),))
