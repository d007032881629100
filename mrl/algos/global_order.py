"""The largest and the smallest of the numbers that all ranks hold: exact, and the same for any division into ranks.

The ranks count their numbers by digit, highest digit first, so that no rank sees those of another.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.algos.rows import Reduce

_DIGIT_BITS = 16
_DIGITS = 1 << _DIGIT_BITS
_SHIFTS = tuple(range(64 - _DIGIT_BITS, -1, -_DIGIT_BITS))


def rising(x_T: Tensor) -> Tensor:
    """Return integers in the order of these float64."""
    bits_T = (x_T + 0.0).view(torch.int64)  # adding 0 turns -0 into 0
    return bits_T ^ ((bits_T >> 63) & torch.iinfo(torch.int64).max)


def _digit(keys_T: Tensor, shift: int) -> Tensor:
    if shift == _SHIFTS[0]:
        return (keys_T >> shift) + _DIGITS // 2  # keys are signed
    return (keys_T >> shift) & (_DIGITS - 1)


def largest(keys_T: Tensor, eligible_T: Tensor, count: int, sum_over_ranks: Reduce) -> Tensor:
    """Return the eligible tokens with the `count` largest keys, and all that equal the smallest of them."""
    chosen_T, open_T, left = torch.zeros_like(eligible_T), eligible_T, count
    for shift in _SHIFTS:
        digit_T = _digit(keys_T, shift)
        counts = sum_over_ranks(torch.bincount(digit_T[open_T], minlength=_DIGITS).double())
        at_least = counts.flip(0).cumsum(0).flip(0)
        if at_least[0] <= left:
            return chosen_T | open_T
        pivot = int((at_least >= left).sum()) - 1
        chosen_T = chosen_T | (open_T & (digit_T > pivot))
        left -= int(at_least[pivot] - counts[pivot])
        open_T = open_T & (digit_T == pivot)
    return chosen_T | open_T


def smallest_within_mean(values_T: Tensor, eligible_T: Tensor, bound: float, sum_over_ranks: Reduce) -> Tensor:
    """Return as many of the smallest eligible values as have a mean of at most `bound`: of equal ones, all or none."""
    keys_T, kept_T, open_T = rising(values_T), torch.zeros_like(eligible_T), eligible_T
    count, total = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for shift in _SHIFTS:
        digit_T = _digit(keys_T, shift)
        counts = torch.bincount(digit_T[open_T], minlength=_DIGITS).double()
        sums = torch.bincount(digit_T[open_T], values_T[open_T], minlength=_DIGITS)
        counts, sums = sum_over_ranks(torch.stack([counts, sums])).unbind()
        counts, sums = count + counts.cumsum(0), total + sums.cumsum(0)
        too_large = (sums > bound * counts).nonzero()  # the mean of the smallest rises with their number
        if not too_large.numel():
            return kept_T | open_T
        pivot = int(too_large[0])
        if pivot:
            count, total = counts[pivot - 1], sums[pivot - 1]
        kept_T = kept_T | (open_T & (digit_T < pivot))
        open_T = open_T & (digit_T == pivot)
    return kept_T
