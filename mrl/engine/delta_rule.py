"""The gated delta rule over packed rows: a matrix per head that forgets, corrects itself by each key, and is read.

With decay a, key k, value v and write strength b, a token changes the matrix S of its head, and its query q reads it:

    S <- a S + k (b (v - a S^T k))^T        output: S^T q

Done token by token, this would be thousands of small steps. Here the corrections of 64 tokens at a time come from one
triangular system, and only the matrices between such chunks are computed in order. All rows of a micro-batch take their
chunks at the same time, and every row begins with zeros.

This file has it in torch, for any device. On CUDA, `delta_kernels` computes 16-bit layers with the kernels of
flash-linear-attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mrl.engine import delta_kernels

CHUNK = 64
Lengths = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RowChunks:
    """Places of packed tokens in chunks of one row each.

    First come the first chunks of all rows, then the second chunks, and so on, longest rows first: the rows that still
    have tokens are always the first ones.
    """

    places: Tensor
    """Place of each token among those of all chunks."""
    num_rows: tuple[int, ...]
    """Number of rows with a first chunk, with a second one, and so on."""
    positions: Tensor
    """Position of each token in its row."""
    ends: Tensor
    """Ends of the rows in the packed tokens, on the host, after a zero."""

    @classmethod
    def of(cls, lengths: Lengths, device: torch.device) -> RowChunks:
        num_chunks = -(-lengths // CHUNK)
        order = np.argsort(-num_chunks, kind="stable")
        rank = np.argsort(order, kind="stable")
        num_rows = (num_chunks[:, None] > np.arange(num_chunks.max())).sum(0)
        before = np.cumsum(num_rows) - num_rows
        row = np.repeat(np.arange(len(lengths)), lengths)
        position = np.arange(len(row)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        places = (before[position // CHUNK] + rank[row]) * CHUNK + position % CHUNK
        return cls(
            torch.from_numpy(places).to(device),
            tuple(num_rows.tolist()),
            torch.from_numpy(position).to(device),
            torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)])),
        )

    def grid(self, x: Tensor) -> Tensor:
        """Return [tokens, heads, ...] as [chunks, heads, tokens of a chunk, ...], with zeros at unused places."""
        places = x.new_zeros(sum(self.num_rows) * CHUNK, *x.shape[1:]).index_put((self.places,), x)
        return places.view(-1, CHUNK, *x.shape[1:]).transpose(1, 2)

    def tokens(self, grid: Tensor) -> Tensor:
        """Return the values of the tokens, [tokens, heads, ...]."""
        return grid.transpose(1, 2).flatten(0, 1)[self.places]


def gated_delta_rule(qkv: tuple[Tensor, Tensor, Tensor], log_decay: Tensor, beta: Tensor, chunks: RowChunks) -> Tensor:
    """Return the outputs [tokens, value heads, value dim]. They are in float32 or wider, or of kernels' dtype.

    Queries and keys [tokens, key heads, key dim] are normalized here, and serve several of the values [tokens, value
    heads, value dim]. Only the arguments are kept for the backward pass, which computes the rest again.
    """
    return _Recomputed.apply(*qkv, log_decay, beta, chunks)  # type: ignore[no-untyped-call, no-any-return]


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *tensors, ctx.chunks = arguments
        ctx.save_for_backward(*tensors)
        return _outputs(tensors, ctx.chunks)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            outputs = _outputs(inputs, ctx.chunks)
        return (*torch.autograd.grad(outputs, inputs, grads[0]), None)


def _outputs(inputs: Sequence[Tensor], chunks: RowChunks) -> Tensor:
    if not delta_kernels.usable(inputs[2]):
        return in_chunks(inputs, chunks)
    delta_kernels.compare_once(inputs, chunks.ends, _of_one_row)
    return delta_kernels.gated_delta_rule(inputs, chunks.ends)


def _of_one_row(inputs: Sequence[Tensor]) -> Tensor:
    return in_chunks(inputs, RowChunks.of(np.array([len(inputs[0])]), inputs[0].device))


def in_chunks(inputs: Sequence[Tensor], chunks: RowChunks) -> Tensor:
    q, k, v, log_decay, beta = inputs
    wide, shared = torch.promote_types(v.dtype, torch.float32), v.shape[1] // k.shape[1]
    q, k, v, log_decay, beta = (chunks.grid(x.to(wide)) for x in (_normalized(q), _normalized(k), v, log_decay, beta))
    q, k = ((x * scale).repeat_interleave(shared, 1) for x, scale in ((q, q.shape[-1] ** -0.5), (k, 1.0)))
    # Logarithm of the decay from the start of the chunk to each token, and from one token (last axis) to another.
    total = log_decay.cumsum(-1)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=v.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()
    # Each correction depends on the earlier ones of its chunk. It is linear in the matrix before the chunk.
    system = beta[..., None] * (k @ k.mT) * between
    known = torch.cat([v, k * total.exp()[..., None]], -1) * beta[..., None]
    fresh, old = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True).split(
        [v.shape[-1], k.shape[-1]], -1
    )
    seen = (q @ k.mT) * between
    q_before, k_after = q * total.exp()[..., None], k * (total[..., -1:] - total).exp()[..., None]
    kept = total[..., -1].exp()[..., None, None]
    return chunks.tokens(_read_in_order((fresh, old, q_before, seen, kept, k_after), chunks.num_rows))


def _read_in_order(parts: Sequence[Tensor], num_rows: tuple[int, ...]) -> Tensor:
    """Return the outputs of all chunks. The matrix of a row goes from each of its chunks to the next."""
    outputs: list[Tensor] = []
    for num, fresh, old, q_before, seen, kept, k_after in zip(
        num_rows, *(torch.split(x, [*num_rows]) for x in parts), strict=True
    ):
        if not outputs:
            state = fresh.new_zeros(*fresh.shape[:2], old.shape[-1], fresh.shape[-1])
        corrections = fresh - old @ state[:num]
        outputs.append(q_before @ state[:num] + seen @ corrections)
        state = state[:num] * kept + k_after.mT @ corrections
    return torch.cat(outputs)


def _normalized(x: Tensor) -> Tensor:
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def row_convolution(x: Tensor, weight: Tensor, chunks: RowChunks) -> Tensor:
    """Return each channel of the tokens [tokens, channels], weighted with the tokens before it in the same row.

    The weight is [channels, 1, kernel], the last for the token itself.
    """
    before = weight.shape[-1] - 1
    # Zeros between the rows, as many as a token sees of earlier ones.
    row = torch.cumsum(chunks.positions == 0, 0) - 1
    output = torch.arange(len(x), device=x.device) + before * row
    padded = x.new_zeros(len(x) + before * chunks.num_rows[0], x.shape[1]).index_put((output + before,), x)
    return torch.nn.functional.conv1d(padded.T[None], weight, groups=len(weight))[0].T[output]
