"""The configurations of `mrl sft`, and of `mrl rm` and `mrl dpo`, where one response was preferred to another."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from mrl.config.bounds import Amount, Bound, Count, NotNegative, Seconds, Share, Text
from mrl.config.schema import (
    ClusterConfig,
    Config,
    DataConfig,
    DeadlinesConfig,
    MegatronModelConfig,
    ModelConfig,
    PlacementConfig,
    RunConfig,
    TrainedModelConfig,
)


@dataclass(frozen=True, kw_only=True)
class SftBatchConfig:
    """How much an update learns from, and how long a row may be."""

    rows_per_update: Count
    """Rows that one optimizer step learns from, over all devices."""
    max_prompt_tokens: Count
    """Longest prompt; data.overlong says what becomes of a longer one."""
    max_response_tokens: Count
    """Longest answer, its end included; with `loss_on: all` everything after the prompt. A longer one is an error."""
    messages: Text | None = None
    """Column of chat messages that end with the answer; null takes columns.prompt and columns.ground_truth."""
    loss_on: Literal["last", "all"] = "last"
    """Learn the last answer alone, or each that the assistant gives from the first message of the user on: as the chat
    template renders it, with the token that ends it."""


@dataclass(frozen=True, kw_only=True)
class SftTrainingConfig:
    """How long to train."""

    steps: Count | None = None
    """Updates at most; either this or `epochs` is given."""
    epochs: Count | None = None
    """Train until as many rows have been drawn as these passes over data.train have; the last update may go beyond."""
    until_loss: Share | None = None
    """Stop before, when the loss, averaged over the last ten updates, is this low; null goes through all steps."""
    seed: NotNegative = 0
    """Of Megatron's random states; the order of rows has data.seed."""
    save_every: NotNegative = 0
    """Updates between checkpoints; 0 saves at the end alone. SIGTERM, SIGHUP, SIGUSR1 and the time limit save too."""
    background_save: bool = True
    """Whether training goes on while a checkpoint is written, from a copy of optimizer and weights on the host."""
    max_failed_saves: NotNegative = 3
    """Checkpoints in a row that cannot be written before the run ends; each is reported, and the next update tries
    again. The last one of a run must succeed."""
    keep: Count = 2
    """The newest checkpoints that are kept."""
    resume: Literal["auto", "never"] = "auto"
    """Whether a run directory that holds a verified checkpoint goes on from it."""
    max_restarts: NotNegative = 0
    """How often the run starts itself again after it lost a worker or a node, from its newest checkpoint; a new
    checkpoint begins the count anew. 0 stops at once."""
    fallback: list[Text] = field(default_factory=list)
    """Overrides with which a run goes on whose devices do not come back within deadlines.resources_s after a loss, as
    `cluster.nodes=3` with the layout that fits there; they hold to the end of this command. Empty gives up then."""
    time_limit_s: Seconds | None = None
    """Wall-clock time after which the run saves and ends; null has none."""
    trackers: list[Text] = field(default_factory=list)
    """Where figures go beside `metrics.jsonl`: `tensorboard`, `wandb`, `mlflow`, `swanlab`, each with the extra of its
    name, or your own as `package.module:class`. One that fails is reported, and the run goes on."""


@dataclass(frozen=True, kw_only=True)
class SftValidationConfig:
    """How the model is measured on data.validation: its loss, of all rows and of each source, and some answers."""

    every: NotNegative = 0
    """Updates between validations; 0 validates never. Before the first update and after the last there is one too."""
    keep_best: bool = False
    """Also save at every update whose `val/loss` is the lowest so far; for `mrl rm` and `mrl dpo`, whose `val/accuracy`
    is the highest, but for `regression`."""
    samples: NotNegative = 4
    """Prompts that the model of `mrl sft` answers greedily at each validation, always the same, of each source in turn;
    0 asks none. The first answer is printed, and all are written into `samples/validation-NNNNNN.parquet`."""
    max_response_tokens: Count = 64
    """Longest of these answers; batch.max_response_tokens and the room in a micro-batch bound them as well. Together
    they take as many forward passes at most, and fewer where the model says what the data says."""


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
    training: SftTrainingConfig
    validation: SftValidationConfig = field(default_factory=SftValidationConfig)

    def trained_roles(self) -> dict[str, TrainedModelConfig]:
        return {"actor": self.actor}

    def model_roles(self) -> dict[str, MegatronModelConfig]:
        return {"actor": self.actor}

    def model_of(self, role: str) -> tuple[str, str]:
        return "model.path", self.model.path


AnyConfig = Config | SftConfig


WITHOUT_REFERENCE = ("simpo", "orpo")
"""Losses of the policy's own log-probs."""
Minority = Annotated[float, Bound("at least 0 and less than 0.5", lambda value: 0 <= value < 0.5)]


@dataclass(frozen=True, kw_only=True)
class RewardLossConfig:
    """What a reward model learns from."""

    loss: Literal["bradley_terry", "regression"] = "bradley_terry"
    """`bradley_terry` learns which response was preferred, `regression` the number that each has."""
    margin: bool = False
    """Whether the preferred response has to win by the margin of its pair (columns.label)."""
    smoothing: Minority = 0.0
    """Share of the pairs that are taken to stand the wrong way round."""
    centering: Amount = 0.0
    """Holds scores around 0, from which a loss of differences lets them drift: times the square of a pair's sum; 0.01
    is usual."""


@dataclass(frozen=True, kw_only=True)
class DpoLossConfig:
    """What a policy learns from pairs, against itself before training."""

    loss: Text = "sigmoid"
    """`sigmoid` (DPO as published), `conservative` and `robust` (labels that may be wrong), `hinge`, `ipo_sum`,
    `ipo_mean`; `simpo` and `orpo`, which know no reference; or your own as `package.module:attribute`."""
    beta: Share = 0.1
    """How far the policy may go for the preferences: a large one holds it closer to the reference."""
    smoothing: Minority = 0.0
    """Share of the pairs that are taken to stand the wrong way round: of `conservative`, `robust` and `simpo`."""
    gamma: Amount = 0.0
    """By how much `simpo` has the preferred response win; subtracted as it stands, not times beta."""
    average: bool = False
    """Whether log-probs are means over a response's tokens instead of sums; beta is then larger, 1 to 5."""
    sft_weight: Amount = 0.0
    """Of the likelihood of the preferred response, which DPO alone lets fall as long as the other's falls more."""
    reference: Literal["in_place", "once"] = "in_place"
    """`in_place` keeps the weights as they were before training, which take the policy's place at every update; `once`
    computes what they say of all rows before the first update, into `reference.bin`, and keeps no such weights."""

    def is_of_means(self) -> bool:
        """Return whether a response's reward is of the mean over its tokens instead of the sum, as the loss is."""
        return self.average or self.loss in ("ipo_mean", "simpo", "orpo")


@dataclass(frozen=True, kw_only=True)
class RankedConfig(SftConfig):
    """What `mrl rm` and `mrl dpo` share with each other and with `mrl sft`: a row is a prompt with its responses."""

    def is_of_pairs(self) -> bool:
        """Return whether rows have two responses or more, as the columns of some source say."""
        sources = [*self.data.train.values(), *self.data.validation.values()]
        return any(source.columns.rejected is not None for source in sources)


@dataclass(frozen=True, kw_only=True)
class RmConfig(RankedConfig):
    """A whole configuration of `mrl rm`."""

    reward: RewardLossConfig


@dataclass(frozen=True, kw_only=True)
class DpoConfig(RankedConfig):
    """A whole configuration of `mrl dpo`."""

    preference: DpoLossConfig
