"""The gated delta rule in chunks, compared with the recurrence token by token in float64, with gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mrl.engine.delta_rule import RowChunks, gated_delta_rule, row_convolution

LENGTHS = np.array([3, 150, 1, 64, 65])
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, KERNEL = 2, 4, 8, 12, 4
CPU = torch.device("cpu")
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def inputs(dtype: Any = torch.float64) -> Inputs:
    """Random queries, keys, values, logarithms of decays, and strengths, of packed rows."""
    torch.manual_seed(0)
    num = int(LENGTHS.sum())
    q, k = (torch.randn(num, KEY_HEADS, KEY_DIM, dtype=torch.float64) for _ in range(2))
    v = torch.randn(num, VALUE_HEADS, VALUE_DIM, dtype=torch.float64)
    log_decay = -torch.rand(num, VALUE_HEADS, dtype=torch.float64)
    log_decay[10:40] *= 50  # a head that forgets nearly everything at each token
    beta = torch.rand(num, VALUE_HEADS, dtype=torch.float64)
    return tuple(x.to(dtype).requires_grad_() for x in (q, k, v, log_decay, beta))  # type: ignore[return-value]


def token_by_token(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """The definition, for one row."""
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(VALUE_HEADS // KEY_HEADS, 1) for x in (q * KEY_DIM**-0.5, k))
    state, outputs = torch.zeros(VALUE_HEADS, KEY_DIM, VALUE_DIM, dtype=v.dtype), []
    for t in range(len(v)):
        state = state * log_decay[t].exp()[:, None, None]
        correction = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + torch.einsum("hk,hv->hkv", k[t], correction)
        outputs.append(torch.einsum("hkv,hk->hv", state, q[t]))
    return torch.stack(outputs)


def by_row(arguments: Inputs) -> Tensor:
    rows = zip(*(x.split(LENGTHS.tolist()) for x in arguments), strict=True)
    return torch.cat([token_by_token(*row) for row in rows])


def chunked(arguments: Inputs) -> Tensor:
    q, k, v, log_decay, beta = arguments
    return gated_delta_rule((q, k, v), log_decay, beta, RowChunks.of(LENGTHS, CPU))


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-10), (torch.float32, 2e-5)])
def test_packed_rows_in_chunks_equal_single_rows_token_by_token(dtype: Any, limit: float) -> None:
    exact, found = inputs(), inputs(dtype)
    expected, outputs = by_row(exact), chunked(found)
    weights = torch.randn_like(expected)
    assert (outputs - expected).abs().max() < limit
    gradients = torch.autograd.grad((expected * weights).sum(), exact)
    for mine, gradient in zip(torch.autograd.grad((outputs * weights.to(dtype)).sum(), found), gradients, strict=True):
        assert (mine - gradient).abs().max() < limit * (1 + gradient.abs().max())


def test_the_convolution_of_packed_rows_sees_no_other_row() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(int(LENGTHS.sum()), 6, dtype=torch.float64), torch.randn(6, 1, KERNEL, dtype=torch.float64)
    rows = [
        torch.nn.functional.conv1d(row.T[None], weight, padding=KERNEL - 1, groups=6)[0, :, : len(row)].T
        for row in x.split(LENGTHS.tolist())
    ]
    torch.testing.assert_close(row_convolution(x, weight, RowChunks.of(LENGTHS, CPU)), torch.cat(rows))


class BytesMade(TorchDispatchMode):
    """Adds up the bytes of all tensors that operations make."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, list | tuple) else (result,):
            self.total += value.nbytes if isinstance(value, Tensor) else 0
        return result


def test_a_longer_row_costs_in_proportion_to_its_length() -> None:
    """Slices of one tensor, chunk by chunk, would make a gradient of the whole row for each chunk."""
    made = []
    for length in (256, 2048):
        q, k, v = (torch.randn(length, 1, 8, requires_grad=True) for _ in range(3))
        log_decay, beta = (torch.rand(length, 1, requires_grad=True) for _ in range(2))
        chunks = RowChunks.of(np.array([length]), CPU)
        with BytesMade() as counted:
            gated_delta_rule((q, k, v), -log_decay, beta, chunks).sum().backward()
        made.append(counted.total)
    assert made[1] < 9 * made[0]
