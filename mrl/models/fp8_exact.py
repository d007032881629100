"""Matrices in FP8 with one scale per block of 128 x 128 that is a power of two.

The product of a number in FP8 and such a scale is a number in bfloat16. So a trainer that computes in bfloat16 and an
engine hold the same weights, and quantizing them again changes nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.models.fp8_scales import BLOCK

FP8_DTYPE = torch.float8_e4m3fn
_LARGEST = 448.0
_LEAST_EXPONENT = -100
"""Smallest exponent of a scale, so that the smallest product is not below the numbers of bfloat16."""


def exact_scales(matrix_RC: Tensor) -> Tensor:
    """Return the smallest powers of two with which no number of a block exceeds the largest in FP8."""
    largest = _blocks(matrix_RC).abs().amax(dim=(1, 3)).float()
    fraction, exponent = torch.frexp(largest / _LARGEST)  # the fraction of a power of two is 0.5
    exponent = torch.where(fraction > 0.5, exponent, exponent - 1).clamp_min(_LEAST_EXPONENT)
    return torch.ldexp(torch.ones_like(largest), exponent)


def to_fp8(matrix_RC: Tensor, scales: Tensor) -> Tensor:
    scaled = _blocks(matrix_RC) * _over_blocks(1.0 / scales, matrix_RC.dtype)
    return scaled.to(FP8_DTYPE).view(matrix_RC.shape)


def from_fp8(fp8_RC: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return _blocks(fp8_RC.to(dtype)).mul_(_over_blocks(scales, dtype)).view(fp8_RC.shape)


def rounded_to_fp8(matrix_RC: Tensor) -> Tensor:
    """Return the values of a matrix in FP8, in its own dtype."""
    scales = exact_scales(matrix_RC)
    return from_fp8(to_fp8(matrix_RC, scales), scales, matrix_RC.dtype)


def _blocks(matrix_RC: Tensor) -> Tensor:
    rows, columns = matrix_RC.shape
    return matrix_RC.reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)


def _over_blocks(scales: Tensor, dtype: torch.dtype) -> Tensor:
    return scales.to(dtype)[:, None, :, None]
