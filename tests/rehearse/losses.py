"""Losses of a user for rehearsals."""

from __future__ import annotations

import torch

from mrl.algos.losses import PolicyTokens, TokenLosses
from mrl.config.algorithm import LossConfig


def with_wrong_shape(tokens: PolicyTokens, config: LossConfig) -> TokenLosses:
    return TokenLosses(-tokens.advantages_T[1:] * tokens.log_probs_T, {})


def with_logits(tokens: PolicyTokens, config: LossConfig) -> TokenLosses:
    """Needs a number for every token and every entry of the vocabulary."""
    logits_TV = tokens.log_probs_T[:, None] * torch.ones(151_936)
    return TokenLosses(-tokens.advantages_T * logits_TV.logsumexp(1), {})
