"""Aggregation of token losses to one number, used by tests and engine alike.

Every mode is a weight per token, so that the loss of the whole batch is a plain sum over tokens, micro-batches,
data-parallel and context-parallel ranks. In any split of the batch, the parts and their gradients add up to the same
values. The denominators are those of the whole batch, and are counted once (`LossNormalizer.of`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.algos.rows import Reduce, Rows, apply_mask, at_least_float32, identity
from mrl.errors import ConfigError, Problem
from mrl.registry import Registry


@dataclass(frozen=True)
class LossNormalizer:
    """Conversion of a batch's token losses to one loss: the mode, its constant, and the denominators of one optimizer
    update, which are totals over all ranks and micro-batches."""

    mode: str
    num_tokens: float
    num_rows: float
    horizon_tokens: int | None = None

    @classmethod
    def of(
        cls,
        mode: str,
        rows: Rows,
        mask_T: Tensor,
        horizon_tokens: int | None = None,
        sum_over_ranks: Reduce = identity,
    ) -> LossNormalizer:
        """Count unmasked tokens, and rows with at least one. A fully masked row is in no denominator."""
        count_B = rows.count(mask_T)
        local = torch.stack([count_B.sum(), (count_B > 0).sum()]).to(torch.float64)
        num_tokens, num_rows = sum_over_ranks(local).tolist()
        return cls(mode, num_tokens, num_rows, horizon_tokens)

    def weights(self, rows: Rows, mask_T: Tensor) -> Tensor:
        """Return each token's weight in the loss, 0 on masked tokens.

        The rows must be whole. A context-parallel rank takes its slice of the weights afterwards.
        """
        return apply_mask(AGGREGATIONS.resolve(self.mode)(self, rows, mask_T), mask_T)

    def aggregate(self, loss_T: Tensor, rows: Rows, mask_T: Tensor) -> Tensor:
        """Return sum_t w_t * loss_t, this shard's part of the whole batch's loss. It is 0 if all tokens are masked."""
        loss_T = at_least_float32(apply_mask(loss_T, mask_T))
        return (loss_T * self.weights(rows, mask_T).to(loss_T.dtype)).sum()


Aggregation = Callable[[LossNormalizer, Rows, Tensor], Tensor]
AGGREGATIONS: Registry[Aggregation] = Registry("loss aggregation")


def _constant(value: float, mask_T: Tensor) -> Tensor:
    return torch.full(mask_T.shape, value, dtype=torch.float64, device=mask_T.device)


@AGGREGATIONS.register("token-mean")
def token_mean(norm: LossNormalizer, rows: Rows, mask_T: Tensor) -> Tensor:
    """DAPO (arXiv 2503.14476): w_t = 1 / N, where N is the number of unmasked tokens of the whole batch."""
    return _constant(1.0 / max(norm.num_tokens, 1.0), mask_T)


@AGGREGATIONS.register("token-sum")
def token_sum(norm: LossNormalizer, rows: Rows, mask_T: Tensor) -> Tensor:
    """w_t = 1."""
    return _constant(1.0, mask_T)


@AGGREGATIONS.register("seq-mean-token-sum")
def seq_mean_token_sum(norm: LossNormalizer, rows: Rows, mask_T: Tensor) -> Tensor:
    """w_t = 1 / R, where R is the number of rows of the whole batch with an unmasked token."""
    return _constant(1.0 / max(norm.num_rows, 1.0), mask_T)


@AGGREGATIONS.register("seq-mean-token-mean")
def seq_mean_token_mean(norm: LossNormalizer, rows: Rows, mask_T: Tensor) -> Tensor:
    """GRPO (arXiv 2402.03300): w_t = 1 / (R * n_row), where n_row is the number of unmasked tokens of the row."""
    per_row_B = rows.count(mask_T).clamp(min=1).to(torch.float64) * max(norm.num_rows, 1.0)
    return rows.expand(1.0 / per_row_B)


@AGGREGATIONS.register("seq-mean-token-sum-norm")
def seq_mean_token_sum_norm(norm: LossNormalizer, rows: Rows, mask_T: Tensor) -> Tensor:
    """Dr.GRPO (arXiv 2503.20783): w_t = 1 / (R * H), where H is `horizon_tokens`, a constant of the run.

    H is never taken from the batch: the longest answer changes from step to step, and would change the loss.
    """
    if norm.horizon_tokens is None or norm.horizon_tokens < 1:
        what = f"seq-mean-token-sum-norm divides by a constant of at least 1, not {norm.horizon_tokens}"
        raise ConfigError(
            [Problem("loss", "horizon_tokens", what, "for example the longest answer that the rollout allows")]
        )
    return seq_mean_token_sum(norm, rows, mask_T) / norm.horizon_tokens
