"""Advantages: how much better than expected each token was; and token rewards, their input.

An estimator is `(AdvantageInputs, AlgorithmConfig) -> Advantages`. Group-wise estimators compare whole rows with the
other rows of their prompt, so they read the `Outcomes` of the whole batch and give each token its row's number. The
others read token rewards. In all of them, a group of one has no comparison and gets 0: its raw score would show the
scale of the reward, not the quality of the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mrl.algos.groups import Outcomes, PromptGroups, check_not_negative
from mrl.algos.rows import Reduce, Rows, apply_mask, at_least_float32, identity
from mrl.algos.sampled_pairs import SampledPairs
from mrl.config.algorithm import AlgorithmConfig
from mrl.errors import BatchError, ConfigError, Problem, RewardError
from mrl.registry import Registry


def scores_to_token_rewards(scores_B: Tensor, rows: Rows, mask_T: Tensor) -> Tensor:
    """Return each row's score on its last unmasked token, 0 elsewhere.

    A row ends with its tokens: no padding, end-of-sequence or stop token is searched for. In a fully masked row no
    token can receive the score, so it is dropped.
    """
    last_B = rows.last_token(mask_T)
    rewards_T = torch.zeros(rows.num_tokens, dtype=at_least_float32(scores_B).dtype, device=scores_B.device)
    rewards_T[last_B[last_B >= 0]] = at_least_float32(scores_B)[last_B >= 0]
    return rewards_T


def check_token_rewards(rewards_T: Tensor, rows: Rows, mask_T: Tensor) -> None:
    """Reject rewards that are not finite, and rewards on masked tokens, which every estimator would lose."""
    for bad_T, defect in (
        (~torch.isfinite(rewards_T), "not finite"),
        (~mask_T & (rewards_T != 0), "on a token that the model did not write"),
    ):
        if bool(bad_T.any()):
            at = int(bad_T.nonzero()[0])
            row = int(rows.row_T[at])
            raise RewardError(
                f"{int(bad_T.sum())} token rewards are {defect}; first: {float(rewards_T[at])} "
                f"on token {at - int(rows.starts_B[row])} of row {row}",
                fix="put a finite reward on a token that the model wrote, such as the last one before the observation",
            )


def apply_kl_penalty(scores_T: Tensor, kl_T: Tensor, mask_T: Tensor, coef: float) -> Tensor:
    """Subtract the KL from the reward: r_t = s_t - coef * kl_t on unmasked tokens, s_t on the others.

    Advantages and the critic's targets are both computed from r. Otherwise the critic would learn another problem than
    the actor solves.
    """
    scores_T = at_least_float32(scores_T)
    return scores_T - coef * apply_mask(kl_T.detach(), mask_T).to(scores_T.dtype)


def kl_penalized_scores(scores_B: Tensor, kl_T: Tensor, rows: Rows, mask_T: Tensor, coef: float) -> Tensor:
    """Subtract the KL from the reward of a whole row: S_i - coef * sum_t kl_t over its unmasked tokens."""
    scores_B = at_least_float32(scores_B)
    return scores_B - coef * rows.sum(apply_mask(kl_T.detach(), mask_T)).to(scores_B.dtype)


def overlong_penalty(lengths_B: Tensor, max_tokens: int, buffer_tokens: int, factor: float = 1.0) -> Tensor:
    """Return DAPO's soft overlong penalty, to be added to the scores.

    p = -factor * clamp((length - (max_tokens - buffer_tokens)) / buffer_tokens, 0, 1): 0 up to the start of the buffer,
    then linearly down to -factor at `max_tokens` and beyond.
    """
    if not 0 < buffer_tokens <= max_tokens:
        what = f"the buffer must be between 1 and max_tokens = {max_tokens}, not {buffer_tokens}"
        raise ConfigError([Problem("overlong penalty", "buffer_tokens", what)])
    if lengths_B.is_floating_point():
        raise BatchError(f"lengths must be integers, not {lengths_B.dtype}")
    into_buffer_B = (lengths_B - (max_tokens - buffer_tokens)).to(torch.float64) / buffer_tokens
    return -factor * into_buffer_B.clamp(0.0, 1.0)


VARIANCE_FLOOR = 1e-8
STD_FLOOR = 1e-6
WEIGHT_FLOOR = 1e-8


@dataclass(frozen=True)
class AdvantageInputs:
    rows: Rows
    mask_T: Tensor
    rewards_T: Tensor | None = None
    """Token rewards, after the KL penalty if there is one."""
    values_T: Tensor | None = None
    baseline_scores_B: Tensor | None = None
    """For ReMax: score of the greedy answer to each row's prompt. For RAE: baseline of its role."""
    batch: Outcomes | None = None
    """All samples of all shards, with scores after the KL penalty if there is one."""
    position_B: Tensor | None = None
    """Index into `batch` for each of this shard's rows, repeated if a sample has several rows. None: the rows are the
    batch."""
    sum_over_ranks: Reduce = identity
    score_norms_T: Tensor | None = None
    """Squared norm of d log pi / d logits of each token, in the loss."""


@dataclass(frozen=True)
class Advantages:
    """The advantages, 0 on masked tokens. `returns_T` is the critic's target, if the estimator has one."""

    advantages_T: Tensor
    returns_T: Tensor | None = None
    figures: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the whole batch, equal on all ranks."""


AdvantageEstimator = Callable[..., Advantages]
"""Called with AdvantageInputs and AlgorithmConfig. Your own also gets `algorithm.options`, as keywords."""
ADVANTAGES: Registry[AdvantageEstimator] = Registry("advantage estimator")


def estimate_advantages(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """Return the advantages of a shard with the configured estimator, without gradients."""
    with torch.no_grad():
        return ADVANTAGES.resolve(config.advantage)(inputs, config, **config.options)


def _required(inputs: AdvantageInputs, column: str) -> Tensor:
    """Return a column that this estimator requires, in at least float32."""
    values: Tensor | None = getattr(inputs, column)
    if values is None:
        raise BatchError(f"this advantage estimator needs `{column}`, which is missing")
    return at_least_float32(values)


def _rewards(inputs: AdvantageInputs) -> Tensor:
    rewards_T = _required(inputs, "rewards_T")
    check_token_rewards(rewards_T, inputs.rows, inputs.mask_T)
    return rewards_T


@ADVANTAGES.register("gae")
def gae(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """GAE (arXiv 1506.02438): A_t = delta_t + gamma lam A_(t+1), with delta_t = r_t + gamma V_(t+1) - V_t.

    Takes the unmasked tokens of each row as if they were adjacent, with V = A = 0 after the last one, and
    returns_t = A_t + V_t. Advantages are whitened after the returns are computed. With lam_critic, the returns have
    their own lambda (decoupled GAE of VC-PPO, arXiv 2503.01491). With lam_length, a row of l tokens has
    lam = max(0, 1 - 1 / (lam_length l)) in its advantages (VAPO, arXiv 2504.05118).
    """
    mask_T = inputs.mask_T
    rewards_T, values_T = _rewards(inputs)[mask_T], _required(inputs, "values_T")[mask_T]
    written = Rows.of(inputs.rows.count(mask_T))
    delta_T = rewards_T + config.gamma * written.next_token(values_T) - values_T
    lam_critic = config.lam if config.lam_critic is None else config.lam_critic
    for_critic_T = written.discounted_sum(delta_T, config.gamma * lam_critic)
    decay: float | Tensor = config.gamma * config.lam
    if config.lam_length is not None:
        lengths_B = written.lengths_B.clamp(min=1).to(delta_T.dtype)
        decay = config.gamma * written.expand((1 - 1 / (config.lam_length * lengths_B)).clamp(min=0))
    advantages_T = _unpack(written.discounted_sum(delta_T, decay), mask_T)
    returns_T = _unpack(for_critic_T + values_T, mask_T)
    if config.whiten:
        advantages_T = whiten(advantages_T, mask_T, inputs.sum_over_ranks)
    return Advantages(advantages_T, returns_T)


@ADVANTAGES.register("reinforce_plus_plus")
def reinforce_plus_plus(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """REINFORCE++ (arXiv 2501.03262): A = whiten(G) over the batch, with G_t = r_t + gamma G_(t+1)."""
    returns_T = _returns_to_go(inputs, config.gamma)
    return Advantages(whiten(returns_T, inputs.mask_T, inputs.sum_over_ranks), returns_T)


@ADVANTAGES.register("remax")
def remax(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """ReMax (arXiv 2310.10505): A_t = G_t - b, with G_t the sum of r from t on, and b the greedy answer's score."""
    return _above_baseline(inputs, "the greedy answer to some prompt has no finite score")


@ADVANTAGES.register("rae")
def rae(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """RAE (arXiv 2506.24119): A_t = R - b after b <- rae_decay b + (1 - rae_decay) R, with b of the row's role."""
    return _above_baseline(inputs, "the baseline of some role is not finite")


def _above_baseline(inputs: AdvantageInputs, problem: str) -> Advantages:
    returns_T = _returns_to_go(inputs, 1.0)
    baseline_T = inputs.rows.expand(_required(inputs, "baseline_scores_B")).to(returns_T.dtype)
    if not bool(torch.isfinite(baseline_T).all()):
        raise RewardError(problem, where="baseline_scores_B")
    return Advantages(apply_mask(returns_T - baseline_T, inputs.mask_T), returns_T)


def _returns_to_go(inputs: AdvantageInputs, gamma: float) -> Tensor:
    mask_T = inputs.mask_T
    written = Rows.of(inputs.rows.count(mask_T))
    return _unpack(written.discounted_sum(_rewards(inputs)[mask_T], gamma), mask_T)


def _unpack(written_T: Tensor, mask_T: Tensor) -> Tensor:
    """Expand values of the unmasked tokens to all tokens, with 0 on masked ones."""
    return torch.zeros(mask_T.shape, dtype=written_T.dtype, device=written_T.device).masked_scatter(mask_T, written_T)


def global_moments(x_T: Tensor, mask_T: Tensor, sum_over_ranks: Reduce = identity) -> tuple[Tensor, Tensor]:
    """Return mean and unbiased variance of the unmasked tokens of all ranks, in float64.

    mean = sum x / N, var = sum (x - mean)^2 / (N - 1); both are 0 for N = 0, var is 0 for N = 1. Two passes are needed,
    because E[x^2] - E[x]^2 loses all precision if the mean is large. A rank without tokens also takes part in both
    reductions, because the others wait for it.
    """
    x_T = apply_mask(x_T.to(torch.float64), mask_T)
    count, total = sum_over_ranks(torch.stack([mask_T.sum().to(torch.float64), x_T.sum()])).unbind()
    mean = total / count.clamp(min=1)
    squares = sum_over_ranks(apply_mask((x_T - mean).square(), mask_T).sum())
    return mean, squares / (count - 1).clamp(min=1)


def whiten(x_T: Tensor, mask_T: Tensor, sum_over_ranks: Reduce = identity) -> Tensor:
    """Return (x - mean) / sqrt(var + 1e-8) over the unmasked tokens of all ranks, and 0 on masked tokens."""
    mean, variance = global_moments(x_T, mask_T, sum_over_ranks)
    return apply_mask(((x_T - mean) * torch.rsqrt(variance + VARIANCE_FLOOR)).to(x_T.dtype), mask_T)


RowAdvantage = Callable[[Tensor, PromptGroups, Outcomes], Tensor]


def by_group(name: str) -> Callable[[RowAdvantage], RowAdvantage]:
    """Register a function of (scores_B in float64, groups, outcomes) that returns one advantage per row."""

    def register(row_advantage: RowAdvantage) -> RowAdvantage:
        def estimate(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
            return Advantages(_expand(name, row_advantage, inputs))

        ADVANTAGES.register(name)(estimate)
        return row_advantage

    return register


def _expand(name: str, row_advantage: RowAdvantage, inputs: AdvantageInputs) -> Tensor:
    batch, groups = _groups(name, inputs)
    advantage_B = row_advantage(batch.scores_B.to(torch.float64), groups, batch)
    if inputs.position_B is not None:
        advantage_B = advantage_B[inputs.position_B]
    return apply_mask(inputs.rows.expand(advantage_B).to(torch.float32), inputs.mask_T)


def _groups(name: str, inputs: AdvantageInputs) -> tuple[Outcomes, PromptGroups]:
    batch = inputs.batch
    if batch is None:
        raise BatchError(f"{name} compares rows of the whole batch and needs its scores and uids (`batch`)")
    groups = PromptGroups.of(batch.uids, device=batch.scores_B.device)
    if batch.uids and int(groups.sizes_G.max()) == 1:
        raise BatchError(
            f"{name} compares the answers to one prompt, but each of the {len(batch.uids)} rows has a different uid",
            fix="sample at least 2 answers per prompt and give them the prompt's uid",
        )
    return batch, groups


@by_group("grpo")
def grpo(scores_B: Tensor, groups: PromptGroups, batch: Outcomes) -> Tensor:
    """GRPO (arXiv 2402.03300): A_i = (s_i - mean) / (std + floor) over i's group, with the unbiased std."""
    centered_B = dr_grpo(scores_B, groups, batch)
    return centered_B / _spread(centered_B, groups)[groups.group_B]


def _spread(centered_B: Tensor, groups: PromptGroups) -> Tensor:
    variance_G = groups.sum(centered_B.square()) / (groups.sizes_G - 1).clamp(min=1)
    return variance_G.sqrt() + STD_FLOOR


@by_group("dr_grpo")
def dr_grpo(scores_B: Tensor, groups: PromptGroups, batch: Outcomes) -> Tensor:
    """Dr.GRPO (arXiv 2503.20783): A_i = s_i - mean over i's group. Its loss uses seq-mean-token-sum-norm."""
    return groups.centered(scores_B)


@by_group("rloo")
def rloo(scores_B: Tensor, groups: PromptGroups, batch: Outcomes) -> Tensor:
    """RLOO (arXiv 2402.14740): A_i = s_i - mean of the *other* rows of i's group = n / (n - 1) * (s_i - mean)."""
    return groups.centered(scores_B) * groups.sizes_B / (groups.sizes_B - 1).clamp(min=1)


@by_group("opo")
def opo(scores_B: Tensor, groups: PromptGroups, batch: Outcomes) -> Tensor:
    """OPO (arXiv 2505.23585): A_i = s_i - sum_j n_j s_j / sum_j n_j over i's group, with n a row's tokens."""
    return groups.centered(scores_B, batch.num_tokens_B)


@by_group("gpg")
def gpg(scores_B: Tensor, groups: PromptGroups, batch: Outcomes) -> Tensor:
    """GPG (arXiv 2504.02546): A_i = B / (B - M) (s_i - mean), with B rows, of which M are in groups of equal scores.

    The factor compensates for rows without a gradient. (verl counts the rows with score 0 as M.)
    """
    num_varied = groups.has_variance(scores_B)[groups.group_B].sum().clamp(min=1)
    return groups.centered(scores_B) * scores_B.numel() / num_varied


@by_group("grpo_passk")
def grpo_passk(scores_B: Tensor, groups: PromptGroups, batch: Outcomes) -> Tensor:
    """Pass@k (arXiv 2503.19595): A_i = (max_j s_j - max_(j != i) s_j) / (std + floor) over i's group.

    Only the best answer of a group has an advantage, unless another one is as good. The std is that of GRPO.
    """
    centered_B = groups.centered(scores_B)
    best_G, second_G = groups.two_largest(centered_B)
    is_best_B = centered_B == best_G[groups.group_B]
    margin_G = torch.where(groups.sizes_G > 1, best_G - second_G, 0.0) / _spread(centered_B, groups)
    return torch.where(is_best_B, margin_G[groups.group_B], 0.0)


@by_group("maxrl")
def maxrl(scores_B: Tensor, groups: PromptGroups, batch: Outcomes) -> Tensor:
    """MaxRL (arXiv 2602.02710): A_i = (s_i - mean) / mean over i's group, for scores of at least 0. 0 if the mean is 0.

    With scores 0 and 1, the update climbs the likelihood of success: rare successes weigh more than in GRPO.
    """
    check_not_negative("maxrl", scores_B, batch.uids)
    mean_G = groups.sum(scores_B) / groups.sizes_G.clamp(min=1)
    return groups.centered(scores_B) / torch.where(mean_G > 0, mean_G, 1.0)[groups.group_B]


@ADVANTAGES.register("gdpo")
def gdpo(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """GDPO (arXiv 2601.05242): A = whiten(sum_k w_k (s_ik - mean_k) / (std_k + floor)) over all tokens.

    s_ik is the score of reward function k with weight w_k; mean_k and std_k are those of i's group. In GRPO, rewards
    with a small spread vanish next to others; here, each has the same influence for the same weight.
    """

    def row_advantage(scores_B: Tensor, groups: PromptGroups, batch: Outcomes) -> Tensor:
        if not batch.rewards:
            raise BatchError("gdpo needs the score of each reward function (`rewards`), which is missing")
        return torch.stack([weight * grpo(reward_B, groups, batch) for weight, reward_B in batch.rewards]).sum(0)

    return Advantages(whiten(_expand("gdpo", row_advantage, inputs), inputs.mask_T, inputs.sum_over_ranks))


@ADVANTAGES.register("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """REINFORCE++ with a baseline (arXiv 2501.03262): A = whiten(s_i - mean over i's group) over all tokens."""
    centered_T = _expand("reinforce_plus_plus_baseline", dr_grpo, inputs)
    return Advantages(whiten(centered_T, inputs.mask_T, inputs.sum_over_ranks))


@ADVANTAGES.register("online_dpo")
def online_dpo(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """Online DPO (arXiv 2402.04792): A_i = dpo_beta / G sum_j +-w_ij sigmoid(-dpo_beta D_ij) over the pairs of row i.

    A pair is a best and a worst row of a group whose scores differ; rows of equal score share it, w = 1 / their number
    of pairs. G is the number of such groups, and D the log-ratio of the better row minus that of the worse, each
    log pi_old - log pi_ref summed over tokens. With the loss -A log pi, summed over tokens, the gradient of a first
    update is that of the mean of -log sigmoid(dpo_beta D) over groups. Rows in no pair have A = 0 and are counted.
    """
    figures: dict[str, float] = {}

    def row_advantage(scores_B: Tensor, groups: PromptGroups, batch: Outcomes) -> Tensor:
        if batch.log_ratios_B is None:
            raise BatchError("online_dpo needs the log-probs of policy and reference (`log_ratios_B`)")
        pairs = SampledPairs.of(scores_B, groups)
        margin_P = config.dpo_beta * pairs.gap(batch.log_ratios_B.to(torch.float64))
        figures.update(pairs.figures(margin_P))
        slope_P = config.dpo_beta * pairs.weight_P * torch.sigmoid(-margin_P)
        zeros_B = torch.zeros_like(scores_B)
        return zeros_B.index_add(0, pairs.better_P, slope_P).index_add(0, pairs.worse_P, -slope_P)

    return Advantages(_expand("online_dpo", row_advantage, inputs), figures=figures)


@ADVANTAGES.register("optimal_token_baseline")
def optimal_token_baseline(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """Optimal token baseline (arXiv 2602.07078): A_t = G_t - sum_j W_jt G_jt / sum_j W_jt over the rows of a prompt.

    G_t is the sum of r from t on, and W_t the sum up to t of |d log pi / d logits|^2 = 1 - 2 pi + sum_v pi_v^2, times
    the square of the token's correction. Rows are compared at equal numbers of unmasked tokens; rows that have ended
    do not count. A row whose tokens up to t were all certain, W_t = 0, weighs next to nothing, or the same if all are.
    """
    mask_T = inputs.mask_T
    batch, groups = _groups("optimal_token_baseline", inputs)
    written = Rows.of(inputs.rows.count(mask_T))
    norms_T = _required(inputs, "score_norms_T").to(torch.float64)[mask_T].clamp(min=0)  # rounding may be below 0
    group_B = groups.group_B if inputs.position_B is None else groups.group_B[inputs.position_B]
    # A number that is subtracted from all rows of a prompt cancels out. Equal scores then have advantages of exactly 0.
    first_G = batch.scores_B.to(torch.float64)[groups.order_B][groups.members.starts_B]
    returns_T = written.discounted_sum(_rewards(inputs)[mask_T].to(torch.float64), 1.0)
    returns_T = returns_T - written.expand(first_G[group_B])
    weights_T = written.sum_up_to(norms_T) + WEIGHT_FLOOR
    longest = int(batch.num_tokens_B.max()) if batch.uids else 0
    place_T = written.expand(group_B) * longest + written.place_T
    sums = torch.zeros(2, len(groups.uids) * longest, dtype=torch.float64, device=returns_T.device)
    sums = inputs.sum_over_ranks(sums.index_add_(1, place_T, torch.stack([weights_T * returns_T, weights_T])))
    advantages_T = returns_T - (sums[0] / sums[1].clamp(min=WEIGHT_FLOOR))[place_T]
    return Advantages(_unpack(advantages_T.to(torch.float32), mask_T))
