"""Messages between trainer and workers. Importing this module loads no engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from mrl.config.schema import MegatronModelConfig
from mrl.data.packing import PackingRules

MicroBatchSizes = list[list[int]]
"""For each data-parallel rank, the number of consecutive rows in each of its micro-batches."""
CRITIC_PREFIX = "critic_"
"""Begin of the names of a critic's methods on workers that are the actor's too."""
PROBED = ("probe_hidden", "probe_scores")
"""Columns that `trainer/model_probe.py` compares with transformers. Scores are log-probs or a score head's values."""


@dataclass(frozen=True)
class ModelSetup:
    """A model, and the settings of its training or inference."""

    path: str
    head: Literal["lm", "score"]
    settings: MegatronModelConfig
    seed: int
    timeout_s: float
    new_head: bool = False
    keeps_reference: bool = False
    """Whether a copy of the weights before training stays on the host."""
    replays_routes: bool = False
    """Whether the experts of each token may come from the engines."""
    teacher: str | None = None
    """Model whose output matrix the policy needs to learn over the full vocabulary."""
    critic: ModelSetup | None = None
    """The critic with adapters on this model."""
    vocab: int | None = None
    """Vocabulary of the policy, for reference and teacher models."""


@dataclass(frozen=True)
class ModelFacts:
    """Properties of the model that the driver plans with."""

    packing: PackingRules
    num_parameters: int
    flops_per_token: float
    device: str
    """CUDA name of the device, or `cpu`."""


@dataclass(frozen=True)
class WholeBatch:
    """Values that a shard needs about the other shards' rows, and the KL coefficient of this step.

    Advantages compare samples. A sample's score is the mean over its rows, including their KL penalty; its rows are the
    segments of a conversation, and all of them get its advantage. So each sample counts once in its group. If segments
    have roles, what one role wrote in a conversation is a separate sample, in the group of its prompt and role.
    """

    uids: Sequence[str]
    """Group of each sample: the uid, or uid and role."""
    kl_coef: float
    sample_of_row: Sequence[int]
    """Number of the sample, by row position."""
    rewards: Sequence[tuple[float, Sequence[float]]] = ()
    """Weight of each reward function and its score of each sample, for estimators that read them."""


@dataclass(frozen=True)
class UpdateReport:
    """Result of one optimizer step: this shard's part of the loss's metrics, and values that are equal on all ranks."""

    parts: dict[str, float]
    grad_norm: float
    learning_rate: float
    applied: bool
    expert_load: dict[str, float] = field(default_factory=dict)
    """Of a model with experts."""
