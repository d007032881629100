"""The configurations of `mrl sft`, and of `mrl rm` and `mrl dpo`, which learn from preferences."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from mrl.config.bounds import Amount, Bound, Count, NotNegative, Seconds, Share, Text, component
from mrl.config.data import DataConfig
from mrl.config.schema import (
    ClusterConfig,
    Config,
    DeadlinesConfig,
    MegatronModelConfig,
    ModelConfig,
    PlacementConfig,
    RunConfig,
    TrainedModelConfig,
)
from mrl.config.training import MetricName, MetricRangeConfig, RecordConfig, Tracker


@dataclass(frozen=True, kw_only=True)
class SftBatchConfig:
    """Rows per update, and the length of a row."""

    rows_per_update: Count
    """Rows in one optimizer step, over all devices."""
    max_prompt_tokens: Count
    """Longest prompt. data.overlong determines what happens to a longer one."""
    max_response_tokens: Count
    """Longest answer, including its end token; with `loss_on: all`, everything after the prompt. A longer one is an
    error."""
    messages: Text | None = None
    """Column with chat messages that end with the answer. Null uses columns.prompt and columns.ground_truth."""
    loss_on: Literal["last", "all"] = "last"
    """Learn only the last answer, or every assistant message after the first user message, as the chat template renders
    it and with its end token."""


@dataclass(frozen=True, kw_only=True)
class SftTrainingConfig:
    """Length of the run, its checkpoints and its output."""

    steps: Count | None = None
    """Maximum number of updates. Set either this or `epochs`."""
    epochs: Count | None = None
    """Passes over data.train: train until this many times the rows of data.train have been drawn. The last update may
    go beyond."""
    until_loss: Share | None = None
    """Stop early when the mean loss of the last ten updates is at most this. Null runs all steps."""
    seed: NotNegative = 0
    """Seed of Megatron's random states. The order of rows has its own seed, data.seed."""
    save_every: NotNegative = 0
    """Updates between checkpoints; 0 saves only at the end. SIGTERM, SIGHUP, SIGUSR1 and the time limit also save."""
    background_save: bool = True
    """Continue training while a checkpoint is written from a copy of optimizer and weights in host memory."""
    max_failed_saves: NotNegative = 3
    """Failed checkpoints in a row before the run ends. Each failure is reported, and the next update tries again. The
    last checkpoint of a run must succeed."""
    keep: Count = 2
    """Number of newest checkpoints to keep."""
    record: RecordConfig = field(default_factory=RecordConfig)
    record_when: dict[MetricName, MetricRangeConfig] = field(default_factory=dict)
    """Record each update in which one of these metrics is outside of its usual range."""
    resume: Literal["auto", "never"] = "auto"
    """Whether to continue from a run directory with a verified checkpoint."""
    max_restarts: NotNegative = 0
    """How often the run restarts itself from its newest checkpoint after it lost a worker or a node. A new checkpoint
    resets the count. 0 stops at once."""
    fallback: list[Text] = field(default_factory=list)
    """Overrides for a restart if the lost devices do not return within deadlines.resources_s: for example
    `cluster.nodes=3` with a layout that fits. They apply until the end of this command. If empty, the run gives up."""
    time_limit_s: Seconds | None = None
    """Wall-clock time after which the run saves and ends. Null sets no limit."""
    trackers: list[Tracker] = field(default_factory=list)
    """Where metrics go in addition to `metrics.jsonl`: `tensorboard`, `wandb`, `mlflow`, `swanlab`, each with the extra
    of the same name, or your own as `package.module:class`. If one fails, the run reports it and continues."""


@dataclass(frozen=True, kw_only=True)
class SftValidationConfig:
    """How the model is evaluated on data.validation: its loss, over all rows and for each source, and some answers."""

    every: NotNegative = 0
    """Updates between validations; 0 never validates. The model is also validated before the first and after the last
    update."""
    keep_best: bool = False
    """Also save after every update with the lowest `val/loss` so far; for `mrl rm` and `mrl dpo`, with the highest
    `val/accuracy`, except for `regression` and `kto`."""
    samples: NotNegative = 4
    """Prompts that `mrl sft` answers greedily at each validation: always the same, taken from each source in turn. 0
    disables this. The first answer is printed, and all are written to `samples/validation-NNNNNN.parquet`."""
    max_response_tokens: Count = 64
    """Longest of these answers. batch.max_response_tokens and the room in a micro-batch also limit them. All answers
    together take at most this many forward passes, fewer if the model answers as the data does."""


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
    """The trained model."""
    training: SftTrainingConfig
    validation: SftValidationConfig = field(default_factory=SftValidationConfig)

    def trained_roles(self) -> dict[str, TrainedModelConfig]:
        return {"actor": self.actor}

    def model_roles(self) -> dict[str, MegatronModelConfig]:
        return {"actor": self.actor}

    def model_of(self, role: str) -> tuple[str, str]:
        return "model.path", self.model.path


AnyConfig = Config | SftConfig


PREFERENCE_LOSSES = ("sigmoid", "conservative", "robust", "hinge", "ipo_sum", "ipo_mean", "simpo", "orpo")
UNPAIRED_LOSSES = ("kto",)
"""Losses of single responses that are labeled desirable or undesirable."""
OF_A_BATCH = {
    "aot": "it sorts the batch",
    "aot_unpaired": "it sorts the batch",
}
"""Preference losses that are refused, with the reason."""
WITHOUT_REFERENCE = ("simpo", "orpo")
"""Losses without a reference model."""
Minority = Annotated[float, Bound("at least 0 and less than 0.5", lambda value: 0 <= value < 0.5)]


@dataclass(frozen=True, kw_only=True)
class RewardLossConfig:
    """Loss of a reward model."""

    loss: Literal["bradley_terry", "regression"] = "bradley_terry"
    """`bradley_terry` learns which response was preferred, `regression` the number of each response."""
    margin: bool = False
    """Require the preferred response to win by the margin of its pair (columns.label)."""
    smoothing: Minority = 0.0
    """Share of the pairs assumed to be labeled the wrong way round."""
    centering: Amount = 0.0
    """Coefficient of a penalty that keeps scores near 0, because a loss of differences lets them drift: the squared sum
    of a pair's scores. 0.01 is usual."""


@dataclass(frozen=True, kw_only=True)
class DpoLossConfig:
    """Loss of a policy that learns from pairs, or from labeled responses, relative to itself before training."""

    loss: Annotated[str, component("preference loss", (*PREFERENCE_LOSSES, *UNPAIRED_LOSSES, *OF_A_BATCH))] = "sigmoid"
    """`sigmoid` (DPO as published), `conservative` and `robust` (labels may be wrong), `hinge`, `ipo_sum`, `ipo_mean`;
    `simpo` and `orpo`, which use no reference; `kto`, which learns from single responses, labeled desirable or not; or
    your own as `package.module:attribute`."""
    beta: Share = 0.1
    """Strength of the reference: a larger value keeps the policy closer to it."""
    smoothing: Minority = 0.0
    """Share of the pairs assumed to be labeled the wrong way round, for `conservative`, `robust` and `simpo`."""
    gamma: Amount = 0.0
    """Margin by which the preferred response should win in `simpo`. It is subtracted directly, not multiplied by
    beta."""
    desirable_weight: Share = 1.0
    """For `kto`: weight of desirable responses, lambda_D. Its paper advises to choose the weights so that the ratio
    desirable_weight x number of desirable responses / (undesirable_weight x number of others) is from 1 to 4/3."""
    undesirable_weight: Share = 1.0
    """For `kto`: weight of undesirable responses, lambda_U."""
    average: bool = False
    """Use the mean of log-probs over a response's tokens instead of the sum. beta is then larger, 1 to 5."""
    sft_weight: Amount = 0.0
    """Weight of the preferred response's likelihood. DPO alone lets it fall as long as the other's falls more."""
    reference: Literal["in_place", "once"] = "in_place"
    """`in_place` keeps the initial weights, which replace the policy's at every update. `once` computes the reference
    log-probs of all rows before the first update, writes them to `reference.bin`, and keeps no such weights."""

    def is_of_means(self) -> bool:
        """Return whether a response's reward uses the mean over its tokens instead of the sum, as the loss does."""
        return self.average or self.loss in ("ipo_mean", "simpo", "orpo")


@dataclass(frozen=True, kw_only=True)
class RankedConfig(SftConfig):
    """Keys that `mrl rm` and `mrl dpo` share with each other and with `mrl sft`. A row is a prompt with its
    responses."""

    def is_of_pairs(self) -> bool:
        """Return whether rows have two responses or more, judged by the columns of the sources."""
        sources = [*self.data.train.values(), *self.data.validation.values()]
        return any(source.columns.rejected is not None for source in sources)

    def is_labeled(self) -> bool:
        """Return whether each response is learned by its own label, desirable or not."""
        return False


@dataclass(frozen=True, kw_only=True)
class RmConfig(RankedConfig):
    """A whole configuration of `mrl rm`."""

    reward: RewardLossConfig


@dataclass(frozen=True, kw_only=True)
class DpoConfig(RankedConfig):
    """A whole configuration of `mrl dpo`."""

    preference: DpoLossConfig

    def is_labeled(self) -> bool:
        return self.preference.loss in UNPAIRED_LOSSES
