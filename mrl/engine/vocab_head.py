"""Log-probabilities and entropies of tokens from hidden states, without storing their logits.

The vocabulary is processed in tiles: `tile_columns` columns for all tokens, small enough for a cache. Each tile yields
two numbers per token, its logsumexp and its entropy, and those of all tiles and all tensor-parallel ranks combine
exactly. The backward pass recomputes each tile. Besides inputs and gradients this needs memory for tokens x (hidden +
columns of a tile), for any vocabulary, and one collective, in the forward pass.

Shapes: T tokens, H hidden, V this rank's columns (padding included), C columns of a tile, K tiles or ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

TILE_BYTES = {"cpu": 1 << 24, "cuda": 1 << 28}  # half of a typical L3 cache; enough work for a GPU in one tile
MIN_COLUMNS = 512  # narrower products are memory-bound, which matters from 8,192 tokens (CPU)

EntropyUse = Literal["none", "value", "grad"]
"""Not computed, computed as a number, or computed with a gradient."""


@dataclass(frozen=True)
class HeadOptions:
    """Conversion of hidden states to log-probabilities."""

    vocab: int
    """Size without padding: later columns are not tokens, and have probability 0 and no gradient."""
    temperature: float
    """Divisor of the logits."""
    entropy: EntropyUse
    group: dist.ProcessGroup | None = None
    """Ranks that share the rows of the weight, evenly and in rank order; None if one rank has all rows."""
    tile_columns: int | None = None
    """Number of columns; None derives it from `TILE_BYTES`."""


def token_log_probs(
    hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor, options: HeadOptions
) -> tuple[Tensor, Tensor | None]:
    """Return the log-probability of each label, and the entropy of each token's distribution if requested, in float32
    or wider.

    A label outside the vocabulary has log-probability -inf. With a group, every rank gets all results; the gradient of
    `hidden_TH` is this rank's part of a sum over the group, which the caller must reduce.
    """
    assert options.temperature > 0, f"temperature {options.temperature} is not positive"
    log_probs_T, entropy_T = _TokenLogProbs.apply(hidden_TH, weight_VH, labels_T, options)  # type: ignore[no-untyped-call]
    return log_probs_T, entropy_T


@torch.no_grad()
def greedy_tokens(hidden_TH: Tensor, weight_VH: Tensor, options: HeadOptions) -> Tensor:
    """Return the likeliest token at each place, the lowest id on ties; with a group, on every rank."""
    tokens_T = torch.full(hidden_TH.shape[:1], options.vocab, device=hidden_TH.device)  # larger than any token id
    tiles = Tiles(hidden_TH, weight_VH, tokens_T, options)
    highest_T = hidden_TH.new_full(tokens_T.shape, -torch.inf, dtype=tiles.dtype)
    for columns in tiles:
        logits_T, column_T = tiles.logits(tiles.weight(columns)).max(1)
        tokens_T = torch.where(logits_T <= highest_T, tokens_T, tiles.first_id + columns.start + column_T)
        highest_T = torch.maximum(highest_T, logits_T)
    if options.group is not None:
        mine_T = highest_T.clone()
        dist.all_reduce(highest_T, dist.ReduceOp.MAX, group=options.group)
        tokens_T = torch.where(mine_T < highest_T, options.vocab, tokens_T)
        dist.all_reduce(tokens_T, dist.ReduceOp.MIN, group=options.group)
    return tokens_T


class Tiles:
    """This rank's logits, one tile at a time."""

    def __init__(self, hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor, options: HeadOptions) -> None:
        rank = options.group.rank() if options.group else 0
        self.first_id = rank * weight_VH.shape[0]
        self.dtype = torch.promote_types(hidden_TH.dtype, torch.float32)
        self.operand_dtype = _operand_dtype(hidden_TH, weight_VH, self.dtype)
        self.hidden_TH = hidden_TH.to(self.operand_dtype)
        self.weight_VH = weight_VH
        self.labels_T = labels_T.long() - self.first_id
        self.num_columns = min(max(options.vocab - self.first_id, 0), weight_VH.shape[0])
        self.temperature = options.temperature
        self.tile_columns = options.tile_columns or _tile_columns(self.labels_T, self.dtype)

    @property
    def num_tiles(self) -> int:
        return -(-self.num_columns // self.tile_columns)

    def __iter__(self) -> Iterator[slice]:
        for start in range(0, self.num_columns, self.tile_columns):
            yield slice(start, min(start + self.tile_columns, self.num_columns))

    def weight(self, columns: slice) -> Tensor:
        return self.weight_VH[columns].to(self.operand_dtype)

    def logits(self, weight_CH: Tensor) -> Tensor:
        logits_TC = self.product(self.hidden_TH, weight_CH.t())
        return logits_TC if self.temperature == 1 else logits_TC.div_(self.temperature)

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """Multiply two matrices, with accumulation and result in `dtype`."""
        if self.operand_dtype == self.dtype:
            return left @ right
        return torch.mm(left, right, out_dtype=self.dtype)

    def add_product(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        """Add the product of two matrices to a total of `dtype`, fused with the multiplication."""
        if self.operand_dtype == self.dtype:
            total.addmm_(left, right)
        else:
            torch.addmm(total, left, right, out_dtype=self.dtype, out=total)

    def labels(self, columns: slice) -> tuple[Tensor, Tensor]:
        """Return for each token whether its label is in the tile, and its column (any column if not)."""
        is_here_T = (self.labels_T >= columns.start) & (self.labels_T < columns.stop)
        column_T1 = (self.labels_T - columns.start).clamp(0, columns.stop - columns.start - 1).unsqueeze(1)
        return is_here_T, column_T1

    def positions(self, columns: slice, ids_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the position of those of these tokens that are in the tile: row and column in `ids_TK`, and column
        of the tile."""
        column_TK = ids_TK.long() - (self.first_id + columns.start)
        place_N, at_N = ((column_TK >= 0) & (column_TK < columns.stop - columns.start)).nonzero(as_tuple=True)
        return place_N, at_N, column_TK[place_N, at_N]


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor, options: HeadOptions
    ) -> tuple[Tensor, Tensor | None]:
        tiles = Tiles(hidden_TH, weight_VH, labels_T, options)
        label_logits_T, logsumexp_T, entropy_T = _reduce(tiles, with_entropy=options.entropy != "none")
        if options.group is not None:
            label_logits_T, logsumexp_T, entropy_T = _reduce_over_ranks(
                label_logits_T, logsumexp_T, entropy_T, options.group
            )
        ctx.options = options
        ctx.save_for_backward(hidden_TH, weight_VH, labels_T, logsumexp_T, entropy_T)
        if options.entropy == "none":
            return label_logits_T - logsumexp_T, None
        if options.entropy == "value":
            ctx.mark_non_differentiable(entropy_T)
        return label_logits_T - logsumexp_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_log_probs_T: Tensor, d_entropy_T: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_VH, labels_T, logsumexp_T, entropy_T = ctx.saved_tensors
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        tiles = Tiles(hidden_TH, weight_VH, labels_T, ctx.options)
        d_hidden_TH = torch.zeros_like(hidden_TH, dtype=tiles.dtype) if needs_hidden else None
        d_weight_VH = torch.zeros_like(weight_VH) if needs_weight else None
        # Gradients with respect to the logits before division by the temperature.
        d_log_probs_T = d_log_probs_T / tiles.temperature
        if ctx.options.entropy != "grad":
            d_entropy_T = None
        elif d_entropy_T is not None:
            d_entropy_T = d_entropy_T / tiles.temperature
        for columns in tiles:
            weight_CH = tiles.weight(columns)
            tile_TC = tiles.logits(weight_CH).sub_(logsumexp_T.unsqueeze(1))
            tile_TC = _through_softmax(tile_TC, d_log_probs_T, d_entropy_T, entropy_T)
            is_here_T, column_T1 = tiles.labels(columns)
            tile_TC.scatter_add_(1, column_T1, (d_log_probs_T * is_here_T).unsqueeze(1))
            d_logits_TC = tile_TC.to(tiles.operand_dtype)
            if d_hidden_TH is not None:
                tiles.add_product(d_hidden_TH, d_logits_TC, weight_CH)
            if d_weight_VH is not None:
                d_weight_VH[columns] = d_logits_TC.t() @ tiles.hidden_TH
        return None if d_hidden_TH is None else d_hidden_TH.to(hidden_TH.dtype), d_weight_VH, None, None


def _reduce(tiles: Tiles, *, with_entropy: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return, over this rank's columns: the logit of the label (-inf on other ranks), logsumexp and entropy."""
    num_tokens = len(tiles.hidden_TH)
    label_logits_T = tiles.hidden_TH.new_full((num_tokens,), -torch.inf, dtype=tiles.dtype)
    logsumexp_KT = label_logits_T.new_empty(tiles.num_tiles, num_tokens)
    entropy_KT = torch.empty_like(logsumexp_KT) if with_entropy else None
    for tile, columns in enumerate(tiles):
        logits_TC = tiles.logits(tiles.weight(columns))
        is_here_T, column_T1 = tiles.labels(columns)
        label_logits_T = torch.where(is_here_T, logits_TC.gather(1, column_T1).squeeze(1), label_logits_T)
        # One fused pass; logsumexp would need several.
        log_probs_TC = torch.log_softmax(logits_TC, dim=1)
        logsumexp_KT[tile] = logits_TC[:, 0] - log_probs_TC[:, 0]
        if entropy_KT is not None:
            entropy_KT[tile] = -log_probs_TC.mul_(log_probs_TC.exp()).sum(1)
    return label_logits_T, *_combine(logsumexp_KT, entropy_KT)


def _combine(logsumexp_KT: Tensor, entropy_KT: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Combine logsumexp and entropy of disjoint parts: entropy of the choice of the part, then within it."""
    logsumexp_T = logsumexp_KT.logsumexp(0)
    if entropy_KT is None:
        return logsumexp_T, None
    chance_KT = (logsumexp_KT - logsumexp_T).exp_()
    return logsumexp_T, (chance_KT * entropy_KT + torch.special.entr(chance_KT)).sum(0)


def _reduce_over_ranks(
    label_logits_T: Tensor, logsumexp_T: Tensor, entropy_T: Tensor | None, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the same three values over the whole vocabulary, with one collective."""
    local = torch.stack(
        [label_logits_T, logsumexp_T] if entropy_T is None else [label_logits_T, logsumexp_T, entropy_T]
    )
    gathered = local.new_empty(group.size() * len(local), local.shape[1])
    dist.all_gather_into_tensor(gathered, local, group=group)
    label_logits_KT, logsumexp_KT, *entropy_KT = gathered.view(group.size(), *local.shape).unbind(1)
    return label_logits_KT.amax(0), *_combine(logsumexp_KT, entropy_KT[0] if entropy_KT else None)


def _through_softmax(
    log_probs_TC: Tensor, d_log_probs_T: Tensor, d_entropy_T: Tensor | None, entropy_T: Tensor | None
) -> Tensor:
    """Return the gradient of the logits without the label's own term. Overwrites `log_probs_TC`."""
    if d_entropy_T is None or entropy_T is None:
        return log_probs_TC.exp_().mul_(-d_log_probs_T.unsqueeze(1))
    probs_TC = log_probs_TC.exp()
    factor_TC = log_probs_TC.add_(entropy_T.unsqueeze(1)).mul_(-d_entropy_T.unsqueeze(1))
    return factor_TC.sub_(d_log_probs_T.unsqueeze(1)).mul_(probs_TC)


def _operand_dtype(hidden_TH: Tensor, weight_VH: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of matrix products: GPUs accumulate bfloat16 products in float32, CPUs are faster in float32."""
    return hidden_TH.dtype if hidden_TH.is_cuda and hidden_TH.dtype == weight_VH.dtype else dtype


def _tile_columns(labels_T: Tensor, dtype: torch.dtype) -> int:
    """Return the number of columns that fits into the bytes of a tile."""
    column_bytes = max(1, len(labels_T)) * dtype.itemsize
    return max(MIN_COLUMNS, TILE_BYTES[labels_T.device.type] // column_bytes)
