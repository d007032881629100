"""Rows of different length, packed one after another: the segment arithmetic used by the other modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.errors import BatchError

Reduce = Callable[[Tensor], Tensor]
"""Reduces a tensor over all data-parallel ranks, by sum or maximum."""


def identity(x: Tensor) -> Tensor:
    """Return the tensor unchanged: the reduction over one rank."""
    return x


def apply_mask(x_T: Tensor, mask_T: Tensor) -> Tensor:
    """Return `x_T` with zeros on masked tokens. This selects instead of multiplying, so that a masked NaN
    disappears."""
    if x_T.shape != mask_T.shape:
        raise BatchError(f"a column of {x_T.numel()} tokens does not match a mask of {mask_T.numel()}")
    return torch.where(mask_T, x_T, torch.zeros((), dtype=x_T.dtype, device=x_T.device))


def at_least_float32(x: Tensor) -> Tensor:
    """Return `x` in its own precision, but at least in float32: bf16 cannot distinguish a reward of 1 from 1.001."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


@dataclass(frozen=True)
class Rows:
    """Positions of the rows' tokens in a packed tensor. Sums run in a fixed order, on any device."""

    lengths_B: Tensor
    starts_B: Tensor
    row_T: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int] | Tensor, device: torch.device | str | None = None) -> Rows:
        """Return rows of these lengths, in this order. A length may be 0."""
        lengths_B = torch.as_tensor(lengths, dtype=torch.int64, device=device)
        if lengths_B.dim() != 1 or bool((lengths_B < 0).any()):
            raise BatchError(f"row lengths must be a flat list of counts, not {lengths_B.tolist()}")
        row_B = torch.arange(lengths_B.numel(), device=lengths_B.device)
        return cls(lengths_B, lengths_B.cumsum(0) - lengths_B, torch.repeat_interleave(row_B, lengths_B))

    @property
    def num_rows(self) -> int:
        return self.lengths_B.numel()

    @property
    def num_tokens(self) -> int:
        """Total number of tokens, including masked ones."""
        return self.row_T.numel()

    def expand(self, x_B: Tensor) -> Tensor:
        if x_B.shape != self.lengths_B.shape:
            raise BatchError(f"a column of {x_B.numel()} values does not match {self.num_rows} rows")
        return x_B[self.row_T]

    def sum(self, x_T: Tensor) -> Tensor:
        """Return each row's sum, 0 for an empty row."""
        self._check(x_T)
        return torch.segment_reduce(x_T, "sum", lengths=self.lengths_B, unsafe=True, initial=0.0)

    @property
    def place_T(self) -> Tensor:
        """Return each token's place in its row, from 0."""
        return torch.arange(self.num_tokens, device=self.row_T.device) - self.expand(self.starts_B)

    def sum_up_to(self, x_T: Tensor) -> Tensor:
        """Return the sum of the row's values up to each token, including its own."""
        self._check(x_T)
        return Rows.of(self.lengths_B.flip(0)).discounted_sum(x_T.flip(0), 1.0).flip(0)

    def count(self, mask_T: Tensor) -> Tensor:
        return self.sum(mask_T.to(torch.float64)).to(torch.int64)

    def mean(self, x_T: Tensor, mask_T: Tensor) -> Tensor:
        """Return each row's mean over its unmasked tokens, 0 for a row without any."""
        return self.sum(apply_mask(x_T, mask_T)) / self.count(mask_T).clamp(min=1)

    def largest(self, x_T: Tensor) -> Tensor:
        """Return each row's largest value, 0 for an empty row or if all are smaller."""
        self._check(x_T)
        return torch.segment_reduce(x_T, "max", lengths=self.lengths_B, unsafe=True, initial=0.0)

    def last_token(self, mask_T: Tensor) -> Tensor:
        """Return the position of each row's last unmasked token, -1 for a row without any."""
        self._check(mask_T)
        position_T = torch.arange(self.num_tokens, dtype=torch.float64, device=mask_T.device)
        position_T = torch.where(mask_T, position_T, -1.0)
        last_B = torch.segment_reduce(position_T, "max", lengths=self.lengths_B, unsafe=True, initial=-1.0)
        return last_B.to(torch.int64)

    def next_token(self, x_T: Tensor, step: int = 1) -> Tensor:
        """Return the value `step` tokens later in the same row, 0 if the row ends earlier."""
        self._check(x_T)
        later_T = torch.zeros_like(x_T)
        later_T[: max(0, self.num_tokens - step)] = x_T[step:]
        position_T = torch.arange(self.num_tokens, device=x_T.device)
        ends_T = self.expand(self.starts_B + self.lengths_B)
        return apply_mask(later_T, position_T + step < ends_T)

    def discounted_sum(self, x_T: Tensor, decay: float | Tensor) -> Tensor:
        """Return y_t = x_t + decay * y_(t+1) within each row, in log2(longest row) rounds instead of one round per
        token. A tensor of decays has one value per token, equal within each row.

        After the round with step s, each entry contains the discounted sum of its next 2s tokens.
        """
        total_T, step = x_T, 1
        longest = int(self.lengths_B.max()) if self.num_rows else 0
        while step < longest:
            total_T = total_T + decay**step * self.next_token(total_T, step)
            step *= 2
        return total_T

    def _check(self, x_T: Tensor) -> None:
        if x_T.shape != self.row_T.shape:
            raise BatchError(
                f"a column of shape {tuple(x_T.shape)} does not match rows with {self.num_tokens} tokens in total"
            )
