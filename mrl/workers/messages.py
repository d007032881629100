"""What the trainer hands to workers and gets back. Light to import: the driver loads no engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mrl.config.schema import MegatronModelConfig
from mrl.data.packing import PackingRules

MicroBatchSizes = list[list[int]]
"""For each data-parallel rank, how many of its rows, which come in that order, make up each micro-batch."""
PROBED = ("probe_hidden", "probe_scores")
"""Columns that `trainer/model_probe.py` holds against transformers: scores are log-probs, or a score head's values."""


@dataclass(frozen=True)
class ModelSetup:
    """A model, and how this run trains or only runs it."""

    path: str
    head: Literal["lm", "score"]
    settings: MegatronModelConfig
    seed: int
    timeout_s: float
    new_head: bool = False
    keeps_reference: bool = False
    """Whether a copy of the weights as they were before training stays on the host."""
    teacher: str | None = None
    """Of a policy that learns over the full vocabulary: the model whose output matrix it needs."""
    vocab: int | None = None
    """Of a teacher: how many tokens the policy has."""


@dataclass(frozen=True)
class ModelFacts:
    """What the driver plans with."""

    packing: PackingRules
    num_parameters: int
    flops_per_token: float
    device: str
    """Its name, as CUDA gives it; `cpu` without one."""


@dataclass(frozen=True)
class WholeBatch:
    """What a shard must know of the other shards' rows, and the KL coefficient of this step.

    What is compared are samples. The score of one is the mean of its rows' with their KL penalty, and its rows, the
    segments of a conversation, all have its advantage: a sample counts once in its group, whatever it is cut into.
    """

    uids: Sequence[str]
    """Of each sample."""
    kl_coef: float
    sample_of_row: Sequence[int]
    """By position."""


@dataclass(frozen=True)
class UpdateReport:
    """One optimizer step: this shard's part of the loss's reports, and what all ranks know alike."""

    parts: dict[str, float]
    grad_norm: float
    learning_rate: float
    applied: bool
