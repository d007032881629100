"""The sections `training`, `validation`, `sync` and `asynchrony`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from mrl.config.bounds import (
    Count,
    NotNegative,
    PlainName,
    Proportion,
    Seconds,
    Share,
    Text,
    component,
    matching,
    own_component,
)
from mrl.config.reward import RewardFunctionConfig

TRACKERS = ("tensorboard", "wandb", "mlflow", "swanlab")
Tracker = Annotated[str, component("tracker", TRACKERS)]


MetricName = Annotated[
    str, matching(r"[A-Za-z0-9][A-Za-z0-9._/@+-]{0,199}", "the name of a metric, such as actor/grad_norm")
]


@dataclass(frozen=True, kw_only=True)
class RecordConfig:
    """Steps that are recorded completely, in `record/`, for `mrl replay` and `mrl diff`, and how much of them."""

    steps: list[Count] = field(default_factory=list)
    """Steps to record."""
    every: NotNegative = 0
    """Also record every step whose number is a multiple of this; 0 records none."""
    gradients: bool = False
    """Also record a digest, a norm and a sketch of each gradient on each rank, in every update of the step."""
    activations: bool = False
    """Also record these for the input and output of each module on each rank, in the first micro-batch of every
    update."""
    max_bytes: Count = 10**10
    """Largest size of all records of a run. A step that would exceed it is not recorded, with a warning."""


@dataclass(frozen=True, kw_only=True)
class MetricRangeConfig:
    """Usual values of a metric. A step outside of them is recorded."""

    min: float | None = None
    """Lowest usual value."""
    max: float | None = None
    """Highest usual value."""
    jump: Share | None = None
    """Largest usual distance from the mean of the ten steps before. It applies from the third step on."""


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Steps of which a trace over all processes is written, in `profile/`, with a summary of idle times."""

    steps: list[Count] = field(default_factory=list)
    """Steps to profile. Consecutive steps have one trace."""
    torch_ranks: list[NotNegative] = field(default_factory=list)
    """Ranks of each trained role in which torch's profiler also records every operation, into files next to the trace.
    This makes their steps slower."""
    memory: bool = False
    """Also write the allocations of the GPUs of these ranks, for PyTorch's memory viewer."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Length of the run, its checkpoints and its output."""

    steps: Count
    """Total steps of the run, including those before a resume."""
    seed: NotNegative = 0
    """Seed of sampling, shuffling and new heads. The order of prompts has its own seed, data.seed."""
    critic_warmup_steps: NotNegative = 0
    """Steps that train only the critic."""
    save_every: NotNegative = 0
    """Steps between checkpoints; 0 saves only at the end. SIGTERM, SIGHUP, SIGUSR1 and the time limit also save."""
    background_save: bool = True
    """Continue training while a checkpoint is written from a copy of optimizer and weights in host memory."""
    max_failed_saves: NotNegative = 3
    """Failed checkpoints in a row before the run ends. Each failure is reported, and the next step tries again. The
    last checkpoint of a run must succeed."""
    keep: Count = 2
    """Number of newest checkpoints to keep, in addition to the best one."""
    resume: Literal["auto", "never"] = "auto"
    """Whether to continue from a run directory with a verified checkpoint of the same configuration."""
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
    metrics: list[Annotated[str, own_component()]] = field(default_factory=list)
    """Your own metrics of a step, as `package.module:function`. Each function gets the batch of the step and returns
    name -> number. The metric is called `own/NAME`. If one fails, the run reports it and continues."""
    dump_steps: list[Count] = field(default_factory=list)
    """Steps whose token ids, log-probs, values and advantages are written to `tensors/` as parquet."""
    record: RecordConfig = field(default_factory=RecordConfig)
    record_when: dict[MetricName, MetricRangeConfig] = field(default_factory=dict)
    """Record a step if one of its metrics leaves its range: name of the metric -> range. A metric that is not finite is
    outside of any range. Digests of weights and optimizer state are then computed in every step."""
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    samples_from: Text | None = None
    """Directory of a run whose recorded samples are trained in place of new ones. No engine and no reward is started,
    and every step must be recorded. Null generates samples."""
    samples_every: NotNegative = 1
    """Steps between files with samples and their text; 0 writes none."""


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """How the policy is evaluated on data.validation."""

    every: NotNegative = 0
    """Steps between validations; 0 never validates. The last step is also validated."""
    first: bool = True
    """Also validate before training."""
    samples_per_prompt: Count = 1
    """Responses to each prompt. Their mean is called mean@samples_per_prompt."""
    k: list[Count] = field(default_factory=list)
    """Values of k for pass@k and maj@k, all computed from the same samples. If empty, `samples_per_prompt` is used."""
    greedy: bool = False
    """Generate one greedy response for each prompt instead of samples."""
    temperature: Share = 1.0
    """Sampling temperature, as in rollout.temperature."""
    top_p: Share = 1.0
    """Nucleus sampling, as in rollout.top_p."""
    top_k: NotNegative = 0
    """Top-k sampling, as in rollout.top_k."""
    solved_at: Proportion = 1.0
    """Lowest score that counts as solved."""
    reward_functions: dict[PlainName, RewardFunctionConfig] = field(default_factory=dict)
    """Functions that score responses instead of those in `reward.functions`, under the same limits."""
    best_metric: Text | None = None
    """Metric that determines the best checkpoint. Null uses `val/score/mean@samples_per_prompt`."""
    best_mode: Literal["max", "min"] = "max"
    """Whether the highest or the lowest value is the best."""
    best_beyond_noise: bool = True
    """Whether a checkpoint must be better than the best one by more than noise: the 95 % interval of the differences
    of the prompts excludes 0, and at least six prompts differ. If false, every improvement counts."""
    keep_best: bool = False
    """Also save after every step with the best validation so far."""
    save_samples: bool = True
    """Write the responses into `samples/validation-NNNNNN.parquet`."""

    @property
    def counts(self) -> list[int]:
        return sorted({*self.k}) or [self.samples_per_prompt]

    @property
    def best(self) -> str:
        return self.best_metric or f"val/score/mean@{self.samples_per_prompt}"

    def figures(self, models: Sequence[str] = (), *, by_rule: bool = True) -> list[str]:
        """Return the metrics of each source and of all together, without the prefix `val/` or `val/SOURCE/`.

        Without functions or environments that score (`by_rule`), only the scores of reward models are measured, under
        the names that metrics use for them.
        """
        means = [f"{name}/mean@{self.samples_per_prompt}" for name in [*by_rule * ["score", "solved"], *models]]
        kinds = by_rule * ["pass", "maj", *bool(models) * ["best"]]
        return [*means, *(f"solved/{kind}@{k}" for k in self.counts if k > 1 for kind in kinds)]

    def source_of_best(self, figures: Sequence[str]) -> str | None:
        """Return the data source of the best metric, empty for all sources together. Return None if it is not in
        `figures`."""
        for figure in figures:
            if self.best == f"val/{figure}":
                return ""
            if self.best.startswith("val/") and self.best.endswith(f"/{figure}"):
                return self.best.removeprefix("val/").removesuffix(f"/{figure}")
        return None


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """How weights are sent from the trainer to the engines, and how their arrival is verified."""

    offload: bool = True
    """Move the trainer's memory to the host while the engines generate, and free the engines' memory while the trainer
    works. Use false if both fit on the devices at once, for example on a laptop without GPUs."""
    bucket_bytes: Count = 256 << 20
    """Bytes sent at once. A transfer needs twice this as extra memory."""
    probe_every: NotNegative = 10
    """Steps between comparisons of log-probs on a fixed prompt between each engine and the trainer. An engine that has
    just started is always compared, as is the mean over all samples of a step. 0 never compares."""
    probe_tolerance: Share | None = None
    """Largest mean difference of log-probs at the same weights; more stops the run. Null warns above the expected
    rounding error (0.05 in bfloat16, 0.1 with experts, 0.001 in float32) and stops the run above ten times that."""


@dataclass(frozen=True, kw_only=True)
class AsynchronyConfig:
    """Whether batches are generated during training, and with which weights."""

    ahead: NotNegative = 0
    """Batches generated ahead of the one in training. This is also the largest age, in updates, of the weights that
    drew a sample. 0 waits for each batch. More needs engines with their own devices."""
    weights: Literal["between", "in_flight"] = "between"
    """When engines take new weights: `between` two batches, so that one version generates each whole batch; or
    `in_flight`, between two tokens of running samples, so that no engine waits for the longest sample of a batch."""
    cache: Literal["recompute", "keep"] | None = None
    """Handling of the KV cache of running samples when weights arrive in flight: recompute it, or keep the values of
    the earlier weights. Null keeps it if `algorithm.correction` weighs the samples and engines have their own
    pool."""
    replay: str | None = None
    """The directory of a run with weights in flight. This run repeats it bit for bit: each engine gets the same
    requests before the same steps. `mrl train --replay RUN` sets it."""
