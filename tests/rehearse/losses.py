"""Losses of a user for rehearsals."""

from __future__ import annotations

from mrl.algos.losses import PolicyTokens, TokenLosses
from mrl.config.algorithm import LossConfig


def with_wrong_shape(tokens: PolicyTokens, config: LossConfig) -> TokenLosses:
    return TokenLosses(-tokens.advantages_T[1:] * tokens.log_probs_T, {})
