"""The configuration of `mrl sft`: supervised training on prompts and their answers."""

from __future__ import annotations

from dataclasses import dataclass, field

from mrl.config.bounds import Count, Text
from mrl.config.schema import (
    ClusterConfig,
    DataConfig,
    DeadlinesConfig,
    ModelConfig,
    PlacementConfig,
    RunConfig,
    TrainedModelConfig,
)
from mrl.config.training import TrainingConfig


@dataclass(frozen=True, kw_only=True)
class SftBatchConfig:
    """How much an update learns from, and how long a row may be."""

    rows_per_update: Count
    """Rows that one optimizer step learns from, over all devices."""
    max_prompt_tokens: Count
    """Longest prompt; data.overlong says what becomes of a longer one."""
    max_response_tokens: Count
    """Longest answer, its end included; a longer one is an error."""
    messages: Text | None = None
    """Column of chat messages that end with the answer; null takes columns.prompt and columns.ground_truth."""


@dataclass(frozen=True, kw_only=True)
class SftConfig:
    """A whole configuration of `mrl sft`."""

    run: RunConfig
    cluster: ClusterConfig
    deadlines: DeadlinesConfig = field(default_factory=DeadlinesConfig)
    placement: PlacementConfig
    model: ModelConfig
    data: DataConfig
    batch: SftBatchConfig
    actor: TrainedModelConfig
    """The model."""
    training: TrainingConfig
