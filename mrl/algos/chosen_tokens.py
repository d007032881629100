"""Tokens that a policy loss treats differently: those whose log-prob and advantage vary together, which lower the
entropy of the policy most (arXiv 2505.22617), or those farthest from the policy that drew them (arXiv 2510.01161).

The choice covers all tokens of an update, on all ranks. It reads log-probs from before the step, so that it is known
before the first micro-batch and does not depend on the layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.algos.global_order import largest, rising, smallest_within_mean
from mrl.algos.rows import Reduce, Rows, apply_mask, identity
from mrl.config.algorithm import LossConfig
from mrl.errors import BatchError


@dataclass(frozen=True)
class UpdateTokens:
    """One rank's tokens of an update. `row_ids_B` are different for all rows of all ranks."""

    rows: Rows
    mask_T: Tensor
    old_log_probs_T: Tensor
    advantages_T: Tensor
    row_ids_B: Tensor
    sum_over_ranks: Reduce = identity
    rollout_log_probs_T: Tensor | None = None
    """Log-probs of the engines, for `m2po`."""


def select_tokens(tokens: UpdateTokens, config: LossConfig) -> Tensor:
    """Return the tokens that `clip_cov` or `m2po` drops, or that `kl_cov` penalizes.

    For the covariances, of N tokens, these are n = max(1, floor(cov_share N)). For `kl_cov`, the n highest covariances,
    and others equal to the lowest of them. For `clip_cov`, n of those with cov_low < Cov_t < cov_high, or all if there
    are fewer. A hash of row and position draws them, so that a token has the same chance as any other, in every layout.
    """
    if config.policy == "m2po":
        return _far_tokens(tokens, config.m2_threshold)
    covariance_T, num_tokens = covariances(tokens)
    num_chosen = max(1, int(config.cov_share * num_tokens))
    eligible_T, keys_T = tokens.mask_T, rising(covariance_T)
    if config.policy == "clip_cov":
        eligible_T = eligible_T & (covariance_T > config.cov_low) & (covariance_T < config.cov_high)
        keys_T = _hashes(tokens)
    return largest(keys_T, eligible_T, num_chosen, tokens.sum_over_ranks)


def _far_tokens(tokens: UpdateTokens, threshold: float) -> Tensor:
    """Return the tokens with the largest (log pi_old - log pi_engine)^2: as few as leave a mean of at most the
    threshold, and all that equal the smallest of them."""
    if tokens.rollout_log_probs_T is None:
        raise BatchError("m2po needs the column `rollout_log_probs`, which is missing")
    mask_T = tokens.mask_T
    old_T, rollout_T = (
        apply_mask(x_T.detach().double(), mask_T) for x_T in (tokens.old_log_probs_T, tokens.rollout_log_probs_T)
    )
    near_T = smallest_within_mean((old_T - rollout_T).square(), mask_T, threshold, tokens.sum_over_ranks)
    return mask_T & ~near_T


def covariances(tokens: UpdateTokens) -> tuple[Tensor, int]:
    """Return Cov_t = (log pi_t - mean log pi) (A_t - mean A), with means over the update's tokens, and their number."""
    mask_T = tokens.mask_T
    columns = [apply_mask(x_T.detach().double(), mask_T) for x_T in (tokens.old_log_probs_T, tokens.advantages_T)]
    sums = torch.stack([mask_T.sum().double(), *(column_T.sum() for column_T in columns)])
    count, *totals = tokens.sum_over_ranks(sums).tolist()
    mean_log_prob, mean_advantage = (total / max(count, 1.0) for total in totals)
    covariance_T = (columns[0] - mean_log_prob) * (columns[1] - mean_advantage)
    return apply_mask(covariance_T, mask_T), int(count)


def _hashes(tokens: UpdateTokens) -> Tensor:
    """Return 63-bit hashes of row id and position by two rounds of SplitMix64's mixing function."""
    rows = tokens.rows
    position_T = torch.arange(rows.num_tokens, device=rows.row_T.device) - rows.expand(rows.starts_B)
    row_T = rows.expand(_mixed(tokens.row_ids_B.to(rows.row_T.device)))
    return _logical_shift(_mixed(row_T ^ position_T), 1)


def _mixed(x: Tensor) -> Tensor:
    x = x + _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ _logical_shift(x, shift)) * _signed(factor)
    return x ^ _logical_shift(x, 31)


def _logical_shift(x: Tensor, by: int) -> Tensor:
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(bits: int) -> int:
    return bits - (1 << 64)
