"""The sections of the run itself: how long, what is kept, how weights travel, and how it is validated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mrl.config.bounds import Count, NotNegative, Proportion, Seconds, Share


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
    """Steps between checkpoints; 0 saves at the end alone. SIGTERM, SIGUSR1 and the time limit save as well."""
    keep: Count = 2
    """The newest checkpoints that are kept, beside the best one."""
    resume: Literal["auto", "never"] = "auto"
    """Whether a run directory that holds a verified checkpoint of the same configuration goes on from it."""
    max_restarts: NotNegative = 0
    """How often the run starts itself again after it lost a worker or a node, from its newest checkpoint; a new
    checkpoint begins the count anew. 0 stops at once."""
    time_limit_s: Seconds | None = None
    """Wall-clock time after which the run saves and ends; null has none."""
    tracker: Literal["none", "tensorboard", "wandb", "both"] = "none"
    """Where figures go beside `metrics.jsonl`; each needs the extra of its name."""
    samples_every: NotNegative = 1
    """Steps between files of samples with their text; 0 writes none."""


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
    probe_tolerance: Share = 0.02
    """Largest mean difference of log-probs at the same weights; more stops the run."""


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """How the policy is measured on data.validation."""

    every: NotNegative = 0
    """Steps between validations; 0 validates never. The last step is validated as well."""
    first: bool = True
    """Also before training."""
    samples_per_prompt: Count = 1
    """Responses to each prompt, for mean@k, pass@k and maj@k."""
    temperature: Share = 1.0
    """As rollout.temperature."""
    top_p: Share = 1.0
    """As rollout.top_p."""
    solved_at: Proportion = 1.0
    """A response counts as right from this score on."""
