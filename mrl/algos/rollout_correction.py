"""Corrects and measures the small difference between the engine's policy, which samples, and the trained policy.

With x_t = log pi_train - log pi_rollout of the sampled token, the ratio is exp(x_t) per token, exp(sum_t x_t) per
sequence, or exp(mean_t x_t), the geometric one, on every token of the row. *Truncate* limits the weight to the bounds
(TIS), *mask* sets it to 0 beyond them (IcePop, masked importance sampling). *Rejection* sets the weight of tokens or
whole rows to 0 by other measures of the same difference. Weights are constants: they multiply the token losses and get
no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.algos.rows import Reduce, Rows, apply_mask, at_least_float32, identity
from mrl.config.algorithm import CorrectionConfig, RejectionConfig
from mrl.errors import BatchError
from mrl.registry import Registry

LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True)
class RolloutPair:
    """The same tokens under the trained policy and under the engine that sampled them. Neither is differentiated."""

    rows: Rows
    mask_T: Tensor
    log_probs_T: Tensor
    rollout_log_probs_T: Tensor

    def __post_init__(self) -> None:
        num_missing = int((~torch.isfinite(apply_mask(self.rollout_log_probs_T, self.mask_T))).sum())
        if num_missing:
            raise BatchError(
                f"{num_missing} of {int(self.mask_T.sum())} tokens have no finite rollout log-prob",
                fix="mask the tokens without a log-prob from the engine, or switch the correction off",
            )

    @property
    def log_ratio_T(self) -> Tensor:
        """x_t, 0 on masked tokens with any filler value."""
        trained_T = at_least_float32(apply_mask(self.log_probs_T.detach(), self.mask_T))
        return trained_T - at_least_float32(apply_mask(self.rollout_log_probs_T.detach(), self.mask_T))


RatioLevel = Callable[[RolloutPair], Tensor]
RATIO_LEVELS: Registry[RatioLevel] = Registry("importance ratio level")


@RATIO_LEVELS.register("token")
def per_token(pair: RolloutPair) -> Tensor:
    """x_t = log pi_old - log pi_engine; the ratio is exp(x_t)."""
    return pair.log_ratio_T


@RATIO_LEVELS.register("sequence")
def per_sequence(pair: RolloutPair) -> Tensor:
    """sum_t x_t, on each token of the row."""
    return pair.rows.expand(pair.rows.sum(pair.log_ratio_T))


@RATIO_LEVELS.register("geometric")
def geometric(pair: RolloutPair) -> Tensor:
    """mean_t x_t, on each token of the row."""
    return pair.rows.expand(pair.rows.mean(pair.log_ratio_T, pair.mask_T))


@RATIO_LEVELS.register("none")
def unweighted(pair: RolloutPair) -> Tensor:
    """0: every ratio is 1, so that only `reject` has an effect."""
    return torch.zeros_like(pair.log_ratio_T)


def correction_weights(pair: RolloutPair, config: CorrectionConfig) -> Tensor:
    """Return the weight of each token's loss, 0 on masked and on rejected tokens."""
    ratio_T = _ratio(pair, config)
    held_T = ratio_T.clamp(config.lower, config.upper)
    if config.beyond == "mask":
        held_T = torch.where(ratio_T == held_T, held_T, 0.0)
    return apply_mask(held_T, kept_tokens(pair, config))


def kept_tokens(pair: RolloutPair, config: CorrectionConfig) -> Tensor:
    """Return the unmasked tokens that are within all bounds of `reject`."""
    kept_T = pair.mask_T
    for rule in config.reject:
        kept_T = kept_T & _within(pair, rule)
    return kept_T


def _within(pair: RolloutPair, rule: RejectionConfig) -> Tensor:
    """Return the tokens that a rule keeps: of the bounds of k1, the logarithms, because x is summed and averaged."""
    unit, _, estimator = rule.statistic.rpartition("_")
    x_T = pair.log_ratio_T.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    if estimator == "k1":
        lower = 1 / rule.upper if rule.lower is None else rule.lower
        value_T = _by_unit(unit, x_T, pair)
        return (value_T >= math.log(lower)) & (value_T <= math.log(rule.upper))
    token_T = 0.5 * x_T.square() if estimator == "k2" else x_T.exp() - 1 - x_T
    return _by_unit(unit, token_T, pair) <= rule.upper


def _by_unit(unit: str, value_T: Tensor, pair: RolloutPair) -> Tensor:
    """Return the value that decides on each token: its own, or one of its row."""
    rows, value_T = pair.rows, apply_mask(value_T, pair.mask_T)
    match unit:
        case "token":
            return value_T
        case "seq_sum":
            return rows.expand(rows.sum(value_T))
        case "seq_mean":
            return rows.expand(rows.mean(value_T, pair.mask_T))
    return rows.expand(rows.largest(value_T))  # seq_max: k2 and k3 are at least 0, as masked tokens are


def _ratio(pair: RolloutPair, config: CorrectionConfig) -> Tensor:
    log_ratio_T = RATIO_LEVELS.resolve(config.level)(pair)
    return log_ratio_T.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def correction_metrics(
    pair: RolloutPair, config: CorrectionConfig, sum_over_ranks: Reduce = identity
) -> dict[str, float]:
    """Measure the effect of the correction over the unmasked tokens of all ranks.

    Effective sample size = (sum w)^2 / (N sum w^2): 1 if all weights are equal, near 0 if a few dominate.
    """
    ratio_T, weights_T = _ratio(pair, config), correction_weights(pair, config)
    above_T, below_T = (
        apply_mask(ratio_T > config.upper, pair.mask_T),
        apply_mask(ratio_T < config.lower, pair.mask_T),
    )
    kept_T, rows = kept_tokens(pair, config), pair.rows
    rejected_B, written_B = rows.count(pair.mask_T & ~kept_T) > 0, rows.count(pair.mask_T) > 0
    columns = (pair.mask_T, weights_T, weights_T.double().square(), above_T, below_T, kept_T, rejected_B, written_B)
    sums = sum_over_ranks(torch.stack([column.double().sum() for column in columns]))
    count, total, squares, above, below, kept, rejected_rows, num_rows = sums.tolist()
    rejected = {
        "rollout_rs_masked_fraction": (count - kept) / max(count, 1.0),
        "rollout_rs_seq_masked_fraction": rejected_rows / max(num_rows, 1.0),
    }
    count = max(count, 1.0)
    return (rejected if config.reject else {}) | {
        "rollout_is_mean": total / count,
        "rollout_is_eff_sample_size": total**2 / (count * squares) if squares else 0.0,
        "rollout_is_ratio_fraction_high": above / count,
        "rollout_is_ratio_fraction_low": below / count,
    }


def staleness_metrics(
    pair: RolloutPair, ages_T: Tensor, sum_over_ranks: Reduce = identity, max_over_ranks: Reduce = identity
) -> dict[str, float]:
    """Measure the ratio of trained to sampling policy by the age, in updates, of the weights that drew a token.

    Returns the mean ratio, which is 1 if nothing has moved, and the effective sample size of the untruncated ratios.
    For truncated ratios it is always near 1.
    """
    ratio_T = pair.log_ratio_T.double().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    oldest = int(max_over_ranks(torch.cat([ages_T, ages_T.new_zeros(1)]).max()))
    age_masks = [apply_mask(pair.mask_T, ages_T == age).double() for age in range(oldest + 1)]
    columns = [torch.stack([mask.sum(), (mask * ratio_T).sum(), (mask * ratio_T.square()).sum()]) for mask in age_masks]
    figures: dict[str, float] = {}
    for age, (count, total, squares) in enumerate(sum_over_ranks(torch.stack(columns)).tolist()):
        if count:
            figures[f"ratio_mean/age_{age}"] = total / count
            figures[f"ratio_eff_sample_size/age_{age}"] = total**2 / (count * squares)
    return figures


def mismatch_metrics(
    pair: RolloutPair, sum_over_ranks: Reduce = identity, max_over_ranks: Reduce = identity
) -> dict[str, float]:
    """Measure the difference between engine and trainer over the unmasked tokens (or rows that have any) of all ranks.

    Per token: `kl` = mean(-x), `k3_kl` = mean(exp(x) - x - 1), `chi2_token` = mean(exp(2x)) - 1, and |x|. Per row, with
    m the mean log-prob: perplexity exp(-m), and m_rollout - m_train. `chi2_seq` = mean(exp(2 sum_t x_t)) - 1.
    """
    rows, mask_T, x_T = pair.rows, pair.mask_T, pair.log_ratio_T.double()
    bounded_T = x_T.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    tokens = {
        "kl": -x_T,
        "k3_kl": bounded_T.exp() - x_T - 1,
        "chi2_token": (2 * bounded_T).exp() - 1,
        "log_prob_abs_diff_mean": x_T.abs(),
    }
    trained_B = rows.mean(pair.log_probs_T.detach().double(), mask_T)
    rollout_B = rows.mean(pair.rollout_log_probs_T.detach().double(), mask_T)
    per_row = {
        "training_ppl": (-trained_B).exp(),
        "rollout_ppl": (-rollout_B).exp(),
        "log_ppl_diff": rollout_B - trained_B,
        "log_ppl_abs_diff": (rollout_B - trained_B).abs(),
        "ppl_ratio": (rollout_B - trained_B).exp(),
        "chi2_seq": (2 * rows.sum(x_T).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)).exp() - 1,
    }
    written_B = rows.count(mask_T) > 0
    sums = [apply_mask(column, mask_T).sum() for column in tokens.values()]
    sums += [apply_mask(column, written_B).sum() for column in per_row.values()]
    counts = [mask_T.sum().double(), written_B.sum().double()]
    *totals, num_tokens, num_rows = sum_over_ranks(torch.stack([*sums, *counts])).tolist()
    denominators = [max(num_tokens, 1.0)] * len(tokens) + [max(num_rows, 1.0)] * len(per_row)
    means = {name: total / by for name, total, by in zip([*tokens, *per_row], totals, denominators, strict=True)}
    largest = max_over_ranks(torch.cat([x_T.abs(), x_T.new_zeros(1)]).max())
    return means | {"log_prob_abs_diff_max": float(largest)}
