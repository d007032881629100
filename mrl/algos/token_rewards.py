"""Rewards as a column of tokens: where a row's score goes, and what the KL penalty takes away."""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.algos.rows import Rows, apply_mask, at_least_float32
from mrl.errors import BatchError, ConfigError, Problem, RewardError


def scores_to_token_rewards(scores_B: Tensor, rows: Rows, mask_T: Tensor) -> Tensor:
    """Return each row's score on its last unmasked token, 0 elsewhere.

    A row ends where its tokens end: no padding, end-of-sequence or stop token is looked for. A fully masked row
    has no token that could earn anything: its score goes nowhere.
    """
    last_B = rows.last_token(mask_T)
    rewards_T = torch.zeros(rows.num_tokens, dtype=at_least_float32(scores_B).dtype, device=scores_B.device)
    rewards_T[last_B[last_B >= 0]] = at_least_float32(scores_B)[last_B >= 0]
    return rewards_T


def check_token_rewards(rewards_T: Tensor, rows: Rows, mask_T: Tensor) -> None:
    """Refuse rewards that are not finite, and rewards on masked tokens, which every estimator would lose."""
    for bad_T, what in (
        (~torch.isfinite(rewards_T), "not finite"),
        (~mask_T & (rewards_T != 0), "on a token that the model did not write"),
    ):
        if bool(bad_T.any()):
            at = int(bad_T.nonzero()[0])
            row = int(rows.row_T[at])
            raise RewardError(
                f"{int(bad_T.sum())} token rewards are {what}; first: {float(rewards_T[at])} "
                f"on token {at - int(rows.starts_B[row])} of row {row}",
                fix="put a finite reward on a token that the model wrote, the last one before the observation say",
            )


def apply_kl_penalty(scores_T: Tensor, kl_T: Tensor, mask_T: Tensor, coef: float) -> Tensor:
    """KL in the reward: r_t = s_t - coef * kl_t on unmasked tokens, s_t on the others.

    Advantages and the critic's targets are both computed from r, or the critic would learn another problem
    than the actor solves.
    """
    scores_T = at_least_float32(scores_T)
    return scores_T - coef * apply_mask(kl_T.detach(), mask_T).to(scores_T.dtype)


def kl_penalized_scores(scores_B: Tensor, kl_T: Tensor, rows: Rows, mask_T: Tensor, coef: float) -> Tensor:
    """KL in the reward of a whole row: S_i - coef * sum_t kl_t over its unmasked tokens."""
    scores_B = at_least_float32(scores_B)
    return scores_B - coef * rows.sum(apply_mask(kl_T.detach(), mask_T)).to(scores_B.dtype)


def overlong_penalty(lengths_B: Tensor, max_tokens: int, buffer_tokens: int, factor: float = 1.0) -> Tensor:
    """DAPO's soft overlong punishment, to be added to the scores.

    p = -factor * clamp((length - (max_tokens - buffer_tokens)) / buffer_tokens, 0, 1): nothing up to where the
    buffer begins, then down in a straight line to -factor at `max_tokens` and beyond.
    """
    if not 0 < buffer_tokens <= max_tokens:
        what = f"the buffer must be between 1 and max_tokens = {max_tokens}, not {buffer_tokens}"
        raise ConfigError([Problem("overlong penalty", "buffer_tokens", what)])
    if lengths_B.is_floating_point():
        raise BatchError(f"lengths are whole numbers of tokens, not {lengths_B.dtype}")
    into_buffer_B = (lengths_B - (max_tokens - buffer_tokens)).to(torch.float64) / buffer_tokens
    return -factor * into_buffer_B.clamp(0.0, 1.0)
