"""The `algorithm` section: what is learned from the samples."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from mrl.config.bounds import Amount, Count, Proportion, Share, Text, at_least, more_than


@dataclass(frozen=True, kw_only=True)
class KlConfig:
    """How the policy is kept near the reference model."""

    where: Literal["none", "reward", "loss", "both"] = "none"
    """Where the divergence is charged. Anything but `none` keeps a reference model beside the actor."""
    coef: Amount = 0.001
    """What it is multiplied by, in the reward and in the loss; adaptive control moves the reward's."""
    in_reward: Text = "k1"
    """Estimator of the reward's share."""
    in_loss: Text = "k3"
    """Estimator of the loss's share. As a loss `k1` exerts no force on average."""
    target: Share | None = None
    """The divergence that the reward's coefficient is steered toward; null keeps the coefficient."""
    horizon_samples: Count = 10_000
    """How many samples the steering takes to react."""


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """What the optimizer of the actor, and of the critic, sees."""

    policy: Text = "ppo"
    """Policy loss: a known name such as `ppo` or `gspo`, or your own as `package.module:attribute`."""
    aggregation: Text = "token-mean"
    """How token losses become one number, over the whole update: `token-mean`, `seq-mean-token-mean`, ..."""
    horizon_tokens: Count | None = None
    """What `seq-mean-token-sum-norm` divides by; null takes rollout.max_response_tokens."""
    clip_low: Proportion = 0.2
    """The ratio of new to old probability counts down to 1 minus this."""
    clip_high: Amount = 0.2
    """And up to 1 plus this."""
    dual_clip: Annotated[float, more_than(1)] | None = 3.0
    """With a negative advantage a token's loss is at most the advantage times this; null sets no bound."""
    entropy_coef: Amount = 0.0
    """Reward for entropy in the loss."""
    log_entropy: bool = True
    """Whether `actor/entropy_mean` is computed where the loss has no entropy: half of the head's work going forward."""
    value_clip: Share | None = 0.5
    """How far the critic may move from its old value in one step before it is clipped; null never clips."""


@dataclass(frozen=True, kw_only=True)
class DynamicSamplingConfig:
    """DAPO: prompts whose samples all score the same are replaced by new ones."""

    most_rounds: Count = 4
    """Rounds of generation in one step; if they do not fill the batch, the run stops."""


@dataclass(frozen=True, kw_only=True)
class OverlongConfig:
    """DAPO: a score falls in a straight line while the response runs through the last tokens that it may have."""

    buffer_tokens: Count
    """How many of rollout.max_response_tokens are the buffer."""
    factor: Share = 1.0
    """What a response of full length loses."""


@dataclass(frozen=True, kw_only=True)
class CorrectionConfig:
    """Weighs samples by how far the engine that made them is from the policy that is trained."""

    level: Text = "token"
    """Ratio per `token`, per `sequence`, or its `geometric` mean."""
    beyond: Literal["truncate", "mask"] = "truncate"
    """What becomes of a weight beyond the bounds: held at the bound, or the token counts for nothing."""
    upper: Annotated[float, at_least(1)] = 2.0
    """Upper bound."""
    lower: Proportion = 0.0
    """Lower bound."""


@dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    """What is learned from the teacher at each token that the policy wrote. Both are read at rollout.temperature."""

    form: Literal["advantage", "sampled", "top_k", "full"]
    """`advantage` takes coef (log pi - log nu) from the advantage of the sampled token, with nu the teacher. The others
    are terms of the loss: an estimate at the sampled token; a divergence of the next token's distributions over the
    teacher's `top_k` likeliest tokens and all others as one; the same over the full vocabulary."""
    coef: Amount = 1.0
    """What it is multiplied by; advantages by rewards count beside it as they are."""
    estimator: Text = "k2"
    """Of `sampled`. What it pushes towards on average: `k2` the reverse KL, `k3` the forward KL."""
    beta: Proportion = 1.0
    """Of `top_k` and `full`: 0 is the forward KL(nu || pi), 1 the reverse KL(pi || nu), and between them the
    generalized Jensen-Shannon divergence with the mixture beta nu + (1 - beta) pi, which is smaller the nearer beta
    is to 0 or 1."""
    top_k: Count = 64
    """Of `top_k`: how many tokens the teacher names at each place."""


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """What is learned from the samples."""

    advantage: Text
    """Advantage estimator: a known name such as `gae` or `grpo`, or your own as `package.module:attribute`."""
    gamma: Proportion = 1.0
    """Discount of later rewards."""
    lam: Proportion = 1.0
    """Of `gae`: 1 trusts the returns, 0 the critic."""
    whiten: bool = True
    """Of `gae`: whiten the advantages over the batch."""
    kl: KlConfig = field(default_factory=KlConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    dynamic_sampling: DynamicSamplingConfig | None = None
    """DAPO's replacement of prompts that teach nothing; null keeps them."""
    overlong: OverlongConfig | None = None
    """DAPO's soft punishment of length; null has none."""
    correction: CorrectionConfig | None = None
    """Importance weights against the mismatch of engine and trainer, reported as `mismatch/rollout_is_*`: mean weight,
    effective sample size (1: all weights are equal), shares of ratios beyond the bounds. Null only measures."""
    distillation: DistillationConfig | None = None
    """Learn from the teacher of the section `teacher`, beside rewards or without any; null where there is none."""
