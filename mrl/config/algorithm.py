"""The `algorithm` section: how the policy learns from the samples."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from mrl.config.bounds import Amount, Bound, Characters, Count, Proportion, Share, at_least, component, more_than

ADVANTAGES = (
    *("gae", "grpo", "dr_grpo", "rloo", "opo", "gpg", "remax"),
    *("reinforce_plus_plus", "reinforce_plus_plus_baseline", "grpo_passk", "maxrl", "gdpo", "online_dpo"),
    *("optimal_token_baseline", "rae"),
)
VECTOR_ADVANTAGES = ("gdpo",)
"""Advantage estimators that read each reward function's score, not only the weighted sum."""
BASELINE_ADVANTAGES = ("remax", "rae")
"""Advantage estimators that subtract a baseline, which comes with the samples, from each row's score."""
REFERENCE_ADVANTAGES = ("online_dpo",)
"""Advantage estimators that compare the policy with the reference, wherever the KL is applied."""
NORM_ADVANTAGES = ("optimal_token_baseline",)
"""Advantage estimators that weigh tokens by the norm of the gradient of their log-probs."""
POLICY_LOSSES = (
    *("ppo", "vanilla", "gspo", "cispo", "gmpo", "geo_mean", "gpg"),
    *("sapo", "dppo_tv", "dppo_kl", "topr", "clip_cov", "kl_cov", "dro", "vespo", "m2po"),
)
CHOOSING_LOSSES = ("clip_cov", "kl_cov", "m2po")
"""Policy losses that choose tokens by old log-probs before the first update of a step."""
AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
KL_ESTIMATORS = ("k1", "k2", "k3", "abs", "k1+", "k3+", "abs+", "kl", "mse", "low_var_kl")
KlEstimator = Annotated[str, component("KL estimator", KL_ESTIMATORS)]
RATIO_LEVELS = ("token", "sequence", "geometric", "none")


@dataclass(frozen=True, kw_only=True)
class KlConfig:
    """How the policy is kept close to the reference model."""

    where: Literal["none", "reward", "loss", "both"] = "none"
    """Where the KL divergence is applied. Any value except `none` keeps a reference model in addition to the actor;
    `online_dpo` keeps one for every value."""
    coef: Amount = 0.001
    """Coefficient of the divergence in the reward and in the loss. Adaptive control changes only the reward's."""
    in_reward: KlEstimator = "k1"
    """Estimator of the KL in the reward."""
    in_loss: KlEstimator = "k3"
    """Estimator of the KL in the loss. As a loss, `k1` has zero gradient on average."""
    target: Share | None = None
    """Target divergence of the adaptive coefficient in the reward. Null keeps the coefficient constant."""
    horizon_samples: Count = 10_000
    """Number of samples over which the adaptive coefficient reacts."""


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The loss of the actor and of the critic."""

    policy: Annotated[str, component("policy loss", POLICY_LOSSES)] = "ppo"
    """Policy loss: a known name such as `ppo` or `gspo`, or your own as `package.module:attribute`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of your own policy loss: its keyword-only parameters. Those of a known one are keys of this section."""
    aggregation: Annotated[str, component("loss aggregation", AGGREGATIONS)] = "token-mean"
    """How token losses are reduced to one number over the whole update: `token-mean`, `seq-mean-token-mean`, ..."""
    horizon_tokens: Count | None = None
    """Divisor of `seq-mean-token-sum-norm`. Null uses rollout.max_response_tokens."""
    clip_low: Proportion = 0.2
    """Lower clip of the probability ratio: 1 minus this value. For `dppo_tv` and `dppo_kl`, the largest divergence of a
    token whose probability falls."""
    clip_high: Amount = 0.2
    """Upper clip of the probability ratio: 1 plus this value. For `dppo_tv` and `dppo_kl`, the largest divergence of a
    token whose probability grows."""
    tau_pos: Annotated[float, more_than(0)] = 1.0
    """For `sapo`: how fast the gate closes for tokens with a positive advantage."""
    tau_neg: Annotated[float, more_than(0)] = 1.05
    """For `sapo`: the same for other tokens."""
    cov_share: Annotated[float, Bound("more than 0 and at most 1", lambda value: 0 < value <= 1)] = 0.0002
    """For `clip_cov` and `kl_cov`: share of an update's tokens that are dropped or penalized, at least one token."""
    cov_low: float = 1.0
    """For `clip_cov`: dropped tokens have a covariance of log-prob and advantage above this."""
    cov_high: float = 5.0
    """For `clip_cov`: dropped tokens have a covariance below this."""
    cov_kl_coef: Annotated[float, more_than(0)] = 1.0
    """For `kl_cov`: coefficient of the penalty."""
    m2_threshold: Annotated[float, more_than(0)] = 0.04
    """For `m2po`: largest mean of (log pi_old - log pi_engine)^2 over the tokens of an update that are kept."""
    dro_beta: Annotated[float, more_than(0)] = 0.05
    """For `dro`: coefficient of the squared log-ratio."""
    vespo_k_pos: Amount = 2.0
    """For `vespo`: exponent of the ratio for tokens without a negative advantage."""
    vespo_lambda_pos: Amount = 3.0
    """For `vespo`: rate at which large ratios lose weight, for the same tokens."""
    vespo_k_neg: Amount = 3.0
    """For `vespo`: exponent of the ratio for tokens with a negative advantage."""
    vespo_lambda_neg: Amount = 2.0
    """For `vespo`: rate at which large ratios lose weight, for the same tokens."""
    opsm_delta: Annotated[float, more_than(0)] | None = None
    """Off-policy sequence masking with any policy loss: where the advantage is negative, a row has no loss if its mean
    log-probability has fallen by more than this since the old log-probs. Null masks none."""
    dual_clip: Annotated[float, more_than(1)] | None = 3.0
    """With a negative advantage, the loss of a token is at most the advantage times this. Null sets no bound."""
    entropy_coef: Amount = 0.0
    """Coefficient of the entropy bonus in the loss."""
    log_entropy: bool = True
    """Compute `actor/entropy_mean` even if the loss has no entropy term. This costs half of the head's forward pass."""
    value_clip: Share | None = 0.5
    """Largest change of a value in one step before it is clipped. Null never clips."""


@dataclass(frozen=True, kw_only=True)
class DynamicSamplingConfig:
    """DAPO: replace prompts whose samples all have the same score."""

    most_rounds: Count = 4
    """Rounds of generation per step. If they do not fill the batch, the run stops."""


@dataclass(frozen=True, kw_only=True)
class OverlongConfig:
    """DAPO: lower the score linearly over the last tokens that a response may have."""

    buffer_tokens: Count
    """Number of tokens, out of rollout.max_response_tokens, in the buffer."""
    factor: Share = 1.0
    """Penalty of a response of full length."""


@dataclass(frozen=True, kw_only=True)
class RejectionConfig:
    """A bound on the mismatch of engine and trainer. Tokens or whole rows beyond it have no loss."""

    statistic: Literal[
        "token_k1",
        "token_k2",
        "token_k3",
        "seq_sum_k1",
        "seq_sum_k2",
        "seq_sum_k3",
        "seq_mean_k1",
        "seq_mean_k2",
        "seq_mean_k3",
        "seq_max_k2",
        "seq_max_k3",
    ]
    """With x = log pi_train - log pi_engine of a token: k1 is the ratio exp(x), k2 is x^2 / 2, k3 is exp(x) - 1 - x.
    `token` judges each token, the others a whole row: by the sum, the mean or the largest value of its tokens. For k1,
    sum and mean are those of x, so that seq_mean_k1 bounds the geometric mean of the ratios."""
    upper: Share
    """Largest value that is kept."""
    lower: Share | None = None
    """Smallest ratio that is kept, for k1. Null uses 1 / upper."""


@dataclass(frozen=True, kw_only=True)
class CorrectionConfig:
    """Importance weights that correct for the difference between the engine's policy and the trained policy."""

    level: Annotated[str, component("importance ratio level", RATIO_LEVELS)] = "token"
    """Ratio per `token`, per `sequence`, or its `geometric` mean; `none` weighs nothing, for `reject` alone."""
    beyond: Literal["truncate", "mask"] = "truncate"
    """Handling of a weight beyond the bounds: truncate it to the bound, or mask the token."""
    upper: Annotated[float, at_least(1)] = 2.0
    """Upper bound."""
    lower: Proportion = 0.0
    """Lower bound."""
    reject: list[RejectionConfig] = field(default_factory=list)
    """Bounds on the mismatch, in addition to the weights: a token must be within all of them, otherwise its weight is
    0. It still counts in means over tokens."""


@dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    """Training signal from the teacher at each token that the policy generated. Both are evaluated at
    rollout.temperature."""

    form: Literal["advantage", "sampled", "top_k", "full"]
    """`advantage` subtracts coef (log pi - log nu) from the advantage of the sampled token, where nu is the teacher.
    The other forms are loss terms: `sampled` is an estimate at the sampled token; `top_k` is a divergence of the
    next-token distributions over the teacher's `top_k` likeliest tokens, with all other tokens as one; `full` is the
    same over the full vocabulary. A teacher with another tokenizer than the policy's reads texts, and needs
    `advantage`: log pi and log nu are then sums over the shortest spans of text that both tokenizers share."""
    coef: Amount = 1.0
    """Coefficient of the teacher's term."""
    reward_coef: Amount = 1.0
    """Coefficient of the advantages from rewards. With 0, the policy learns from the teacher alone, and rewards only
    choose {success} and are measured."""
    estimator: KlEstimator = "k2"
    """Estimator of `sampled`. Its average gradient is that of the reverse KL for `k2`, of the forward KL for `k3`."""
    beta: Proportion = 1.0
    """For `top_k` and `full`: 0 is the forward KL(nu || pi), 1 the reverse KL(pi || nu). Values between are the
    generalized Jensen-Shannon divergence with the mixture beta nu + (1 - beta) pi, which becomes smaller as beta
    approaches 0 or 1."""
    top_k: Count = 64
    """For `top_k`: number of tokens that the teacher returns at each position."""
    context: Characters | None = None
    """Text that the teacher reads in place of the user's last message, with {prompt} for that message and, optionally,
    {ground_truth} and {success}, another sample of the same prompt that scored at least `success_at`. A sample without
    one has no teacher. Without the section `teacher`, the policy is its own teacher, with the weights from before the
    update. Null shows the teacher the policy's prompt."""
    context_tokens: Count | None = None
    """Largest number of tokens of the teacher's prompt with `context`. Null uses rollout.max_prompt_tokens, which
    {success} refuses."""
    success_at: float | None = None
    """For {success}: smallest score of a sample that a teacher may read."""
    success_after: Characters | None = None
    """For {success}: the teacher reads what follows the last occurrence of this text, such as `</think>`. Null, and a
    sample without it, show the whole response."""


LARGEST_MASK = 128
"""Largest `rollout.top_k` with a sampling mask: the bytes of a mask are proportional to it."""
NUM_TIES = 8
"""Number of tokens above `top_k` in a mask: vLLM also keeps the tokens whose logit equals the last one of the top k."""


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """How the policy learns from the samples."""

    advantage: Annotated[str, component("advantage estimator", ADVANTAGES)]
    """Advantage estimator: a known name such as `gae` or `grpo`, or your own as `package.module:attribute`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of your own advantage estimator: its keyword-only parameters."""
    gamma: Proportion = 1.0
    """Discount of later rewards."""
    lam: Proportion = 1.0
    """For `gae`: 1 uses the returns, 0 the critic."""
    lam_critic: Proportion | None = None
    """For `gae`: lambda of the critic's targets, as in VC-PPO, where it is 1. Null uses `lam`."""
    lam_length: Annotated[float, more_than(0)] | None = None
    """For `gae`: alpha of VAPO, which uses 0.05. Advantages of a response of l tokens have the lambda
    1 - 1 / (alpha l), at least 0, instead of `lam`. Null uses `lam`."""
    whiten: bool = True
    """For `gae`: whiten the advantages over the batch."""
    dpo_beta: Share = 0.1
    """For `online_dpo`: strength of the reference. A larger value keeps the policy closer to it."""
    rae_decay: Annotated[float, Bound("at least 0 and below 1", lambda value: 0 <= value < 1)] = 0.95
    """For `rae`: weight of the old baseline of a role when it is updated with a score. 0.95 is SPIRAL's."""
    kl: KlConfig = field(default_factory=KlConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    dynamic_sampling: DynamicSamplingConfig | None = None
    """DAPO's replacement of prompts whose samples all score the same. Null keeps them."""
    overlong: OverlongConfig | None = None
    """DAPO's soft length penalty. Null applies none."""
    correction: CorrectionConfig | None = None
    """Importance weights for the mismatch of engine and trainer, reported as `mismatch/rollout_is_*`: mean weight,
    effective sample size (1: all weights are equal), shares of ratios beyond the bounds. Null only measures them."""
    old_log_probs: Literal["trainer", "engine", "interpolated"] = "trainer"
    """Log-probs of the old policy in the loss. `trainer`: the trainer computes them before the first update.
    `engine`: those of the engine that drew the tokens, so that the ratio also corrects stale weights and the
    difference between engine and trainer. `interpolated`, with `asynchrony.ahead`: a token whose weights are d steps
    old gets 1/d of the engine's log-prob and the rest of the current one (A-3PO). The last two save a forward pass."""
    router_replay: Literal["none", "R2", "R3"] = "none"
    """For mixtures of experts. `R3`: log-probs and updates use the experts that the engine chose for each token, in
    all layers. `R2`: updates use the experts that the trainer chose when it computed the old log-probs. `none`: the
    trainer's routers choose each time, and their choice may differ from the engine's."""
    keep_sampling_mask: bool = False
    """Compute log-probs over the tokens from which each response token was drawn. With `rollout.top_k` and
    `rollout.top_p`, engines draw from a part of the vocabulary. They return the ids of this part, and old log-probs,
    updates, entropies and the reference use it, so that ratios and mismatch are exact (DeepSeek-V3.2). If false,
    log-probs are over the whole vocabulary."""
    distillation: DistillationConfig | None = None
    """Learning from the model in the section `teacher`, with or without rewards. Null uses no teacher."""
