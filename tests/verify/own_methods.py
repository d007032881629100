"""Methods of a user: right ones with oracles, and ones with each mistake that `mrl verify algorithm` must find."""

from __future__ import annotations

import math

import torch

from mrl.algos.advantages import AdvantageInputs, Advantages
from mrl.algos.losses import PolicyTokens, TokenLosses, gpg
from mrl.algos.rows import apply_mask
from mrl.config.algorithm import AlgorithmConfig, LossConfig
from mrl.config.bounds import Share

Rows = list[list[float]]


def _losses(tokens: PolicyTokens, loss_T: torch.Tensor) -> TokenLosses:
    return TokenLosses(loss_T, {"ppo_kl": -tokens.log_ratio_T.detach()})


def scaled(tokens: PolicyTokens, config: LossConfig, *, scale: Share = 2.0) -> TokenLosses:
    """Scaled (arXiv 1234.56789): l_t = -scale A r_t."""
    return _losses(tokens, -scale * tokens.advantage_T * tokens.log_ratio_T.exp())


def scaled_oracle(log_probs: Rows, old_log_probs: Rows, advantages: Rows, *, scale: float = 2.0) -> list:  # type: ignore[type-arg]
    def token(new: float, old: float, advantage: float) -> tuple[float, float]:
        loss = -scale * advantage * math.exp(new - old)
        return loss, loss

    rows = zip(log_probs, old_log_probs, advantages, strict=True)
    return [[token(*values) for values in zip(*row, strict=True)] for row in rows]


def wrong_sign(tokens: PolicyTokens, config: LossConfig) -> TokenLosses:
    return _losses(tokens, tokens.advantage_T * tokens.log_ratio_T.exp())


def wrong_sign_oracle(log_probs: Rows, old_log_probs: Rows, advantages: Rows) -> list:  # type: ignore[type-arg]
    return scaled_oracle(log_probs, old_log_probs, advantages, scale=1.0)


def wrong_gradient(tokens: PolicyTokens, config: LossConfig) -> TokenLosses:
    return _losses(tokens, -tokens.advantage_T * tokens.log_ratio_T.detach().exp() + 0 * tokens.log_ratio_T)


wrong_gradient_oracle = wrong_sign_oracle


def reads_masked(tokens: PolicyTokens, config: LossConfig) -> TokenLosses:
    return _losses(tokens, -tokens.advantage_T * (tokens.log_probs_T - tokens.old_log_probs_T.detach()).exp())


def learns_the_advantage(tokens: PolicyTokens, config: LossConfig) -> TokenLosses:
    return _losses(tokens, -apply_mask(tokens.advantages_T, tokens.mask_T) * tokens.log_ratio_T.exp())


def reads_other_rows(tokens: PolicyTokens, config: LossConfig) -> TokenLosses:
    return _losses(tokens, -(tokens.advantage_T - tokens.advantage_T.mean()) * tokens.log_ratio_T.exp())


def reports_nothing(tokens: PolicyTokens, config: LossConfig) -> TokenLosses:
    return TokenLosses(gpg(tokens, config).loss_T, {})


def _scores(inputs: AdvantageInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """The scores of the whole batch, and those of this rank."""
    assert inputs.batch is not None
    return inputs.batch.scores_B, inputs.batch.scores_B[inputs.position_B]


def _advantages(inputs: AdvantageInputs, advantage_B: torch.Tensor) -> Advantages:
    return Advantages(apply_mask(inputs.rows.expand(advantage_B), inputs.mask_T))


def centered(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    whole_B, own_B = _scores(inputs)
    return _advantages(inputs, own_B - whole_B.mean())


def centered_oracle(scores: list[float]) -> list[float]:
    return [score - math.fsum(scores) / len(scores) for score in scores]


def centered_on_its_rank(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    own_B = _scores(inputs)[1]
    return _advantages(inputs, own_B - own_B.mean())


def compares_with_the_first(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    whole_B, own_B = _scores(inputs)
    return _advantages(inputs, own_B - whole_B[0])


def on_masked_tokens(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    return Advantages(inputs.rows.expand(_scores(inputs)[1]))


def uncentered(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    return _advantages(inputs, _scores(inputs)[1])


uncentered_oracle = centered_oracle


def offset(inputs: AdvantageInputs, config: AlgorithmConfig, *, by: float) -> Advantages:
    return Advantages(apply_mask(torch.full(inputs.mask_T.shape, by), inputs.mask_T))
