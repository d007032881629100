"""The sections `training`, `validation`, `sync` and `asynchrony`: how a run goes, and how weights get into engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from mrl.config.bounds import Count, NotNegative, PlainName, Proportion, Seconds, Share, Text
from mrl.config.reward import RewardFunctionConfig


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How long the run is, and what it leaves behind."""

    steps: Count
    """Steps of the whole run, those before a resume included."""
    seed: NotNegative = 0
    """Decides everything that is drawn: sampling, shuffling, new heads. The order of prompts has data.seed."""
    critic_warmup_steps: NotNegative = 0
    """Steps in which only the critic learns."""
    save_every: NotNegative = 0
    """Steps between checkpoints; 0 saves at the end alone. SIGTERM, SIGHUP, SIGUSR1 and the time limit save too."""
    background_save: bool = True
    """Whether training goes on while a checkpoint is written, from a copy of optimizer and weights on the host."""
    max_failed_saves: NotNegative = 3
    """Checkpoints in a row that cannot be written before the run ends; each is reported, and the next step tries again.
    The last one of a run must succeed."""
    keep: Count = 2
    """The newest checkpoints that are kept, beside the best one."""
    resume: Literal["auto", "never"] = "auto"
    """Whether a run directory that holds a verified checkpoint of the same configuration goes on from it."""
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
    metrics: list[Text] = field(default_factory=list)
    """Your own figures of a step, `package.module:function`: each is given the step's batch and returns name -> number,
    which metrics call `own/NAME`. One that fails is reported, and the run goes on."""
    dump_steps: list[Count] = field(default_factory=list)
    """Steps whose token ids, log-probs, values, advantages and the like are written to `tensors/`, as parquet."""
    samples_every: NotNegative = 1
    """Steps between files of samples with their text; 0 writes none."""


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """How the policy is measured on data.validation."""

    every: NotNegative = 0
    """Steps between validations; 0 validates never. The last step is validated as well."""
    first: bool = True
    """Also before training."""
    samples_per_prompt: Count = 1
    """Responses to each prompt; their mean is called mean@samples_per_prompt."""
    k: list[Count] = field(default_factory=list)
    """For which k pass@k and maj@k are computed, all from the same samples; none takes `samples_per_prompt`."""
    greedy: bool = False
    """One response to each prompt, of the likeliest token at every place, in place of samples."""
    temperature: Share = 1.0
    """As rollout.temperature."""
    top_p: Share = 1.0
    """As rollout.top_p."""
    top_k: NotNegative = 0
    """As rollout.top_k."""
    solved_at: Proportion = 1.0
    """A response counts as right from this score on."""
    reward_functions: dict[PlainName, RewardFunctionConfig] = field(default_factory=dict)
    """Functions that score responses in place of those of `reward.functions`, under the same limits."""
    best_metric: Text | None = None
    """The figure that says which checkpoint is the best; null takes `val/score/mean@samples_per_prompt`."""
    best_mode: Literal["max", "min"] = "max"
    """Whether the highest or the lowest is the best."""
    keep_best: bool = False
    """Also save at every step whose validation is the best so far."""
    save_samples: bool = True
    """Write the responses into `samples/validation-NNNNNN.parquet`."""

    @property
    def counts(self) -> list[int]:
        return sorted({*self.k}) or [self.samples_per_prompt]

    @property
    def best(self) -> str:
        return self.best_metric or f"val/score/mean@{self.samples_per_prompt}"

    def figures(self, models: Sequence[str] = (), *, by_rule: bool = True) -> list[str]:
        """Return what is measured of each source and of all together, as it stands behind `val/` or `val/SOURCE/`.

        Without a rule that says what is right there is only what reward models say, by what metrics call them.
        """
        means = [f"{what}/mean@{self.samples_per_prompt}" for what in [*by_rule * ["score", "solved"], *models]]
        kinds = by_rule * ["pass", "maj", *bool(models) * ["best"]]
        return [*means, *(f"solved/{kind}@{k}" for k in self.counts if k > 1 for kind in kinds)]

    def source_of_best(self, figures: Sequence[str]) -> str | None:
        """Return the source that the best goes by, empty for all together; None where it is none of these figures."""
        for figure in figures:
            if self.best == f"val/{figure}":
                return ""
            if self.best.startswith("val/") and self.best.endswith(f"/{figure}"):
                return self.best.removeprefix("val/").removesuffix(f"/{figure}")
        return None


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """How weights travel from the trainer into the engines, and how it is known that they arrived."""

    offload: bool = True
    """Whether the trainer's memory is on the host while the engines generate, and the engines give theirs back while
    it trains; false where both fit on the devices at once, as on a laptop without GPUs."""
    bucket_bytes: Count = 256 << 20
    """What travels at once; twice this is the extra memory."""
    probe_every: NotNegative = 10
    """Steps between comparisons of each engine's log-probs of a fixed prompt with the trainer's; one that has just
    started is always compared, and so is the mean over all samples of a step. 0 never compares any."""
    probe_tolerance: Share | None = None
    """Largest mean difference of log-probs at the same weights; more stops the run. null warns beyond what rounding may
    make (0.05 in bfloat16, 0.1 with experts, 0.001 in float32), and stops the run beyond ten times that."""


@dataclass(frozen=True, kw_only=True)
class AsynchronyConfig:
    """Whether batches are generated while others are trained, and by which weights."""

    ahead: NotNegative = 0
    """Batches that are generated ahead of the one that is trained, which is how many updates old the weights may be
    that drew a sample: 0 waits for each batch. More needs engines with devices of their own."""
    weights: Literal["between", "in_flight"] = "between"
    """When engines take new weights: `between` two batches, so that one version draws each of them whole; or
    `in_flight`, between two tokens of the samples that they have under way, so that no engine waits for the longest
    sample of a batch."""
    cache: Literal["recompute", "keep"] | None = None
    """What becomes of the keys and values of samples under way when weights come in flight: computed anew, or kept
    as the weights before made them. null keeps them where `algorithm.correction` weighs the samples and engines have a
    pool of their own."""
    replay: str | None = None
    """The directory of a run with weights in flight, which this one repeats to the bit: each engine is asked the same
    before the same of its steps. `mrl train --replay RUN` sets it."""
