"""Log-probabilities and entropies over the tokens of a sampling mask, from hidden states, without storing other logits.

Of each tile of `vocab_head`, the forward pass keeps only the logits of these tokens; each is on one tensor-parallel
rank, so that one collective completes them. The backward pass computes no logits, because it needs no others.

Shapes: as in `vocab_head`; M ids per token in the mask, -1 in unused places.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mrl.engine.vocab_head import HeadOptions, Tiles


def masked_log_probs(
    hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor, mask_TM: Tensor, options: HeadOptions
) -> tuple[Tensor, Tensor | None]:
    """Return the log-probability of each label among the tokens of its mask, and the entropy of each token's
    distribution over its mask if requested.

    A label outside its mask has log-probability -inf. Groups and gradients are as in `token_log_probs`.
    """
    logits_TM = _MaskLogits.apply(hidden_TH, weight_VH, labels_T, mask_TM, options)  # type: ignore[no-untyped-call]
    log_probs_TM = logits_TM.log_softmax(1)
    is_label_TM = mask_TM == labels_T.unsqueeze(1)
    log_probs_T = torch.where(is_label_TM, log_probs_TM, 0.0).sum(1).masked_fill(~is_label_TM.any(1), -torch.inf)
    if options.entropy == "none":
        return log_probs_T, None
    entropy_T = -(log_probs_TM.exp() * torch.where(mask_TM >= 0, log_probs_TM, 0.0)).sum(1)
    return log_probs_T, entropy_T if options.entropy == "grad" else entropy_T.detach()


class _MaskLogits(torch.autograd.Function):
    """Logits of the tokens of each mask, on every rank of the group; -inf in unused places."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor, mask_TM: Tensor, options: HeadOptions
    ) -> Tensor:
        tiles = Tiles(hidden_TH, weight_VH, labels_T, options)
        logits_TM = hidden_TH.new_full(mask_TM.shape, -torch.inf, dtype=tiles.dtype)
        for columns in tiles:
            place_N, at_N, column_N = tiles.positions(columns, mask_TM)
            logits_TM[place_N, at_N] = tiles.logits(tiles.weight(columns))[place_N, column_N]
        if options.group is not None:
            dist.all_reduce(logits_TM, dist.ReduceOp.MAX, group=options.group)
        ctx.options = options
        ctx.save_for_backward(hidden_TH, weight_VH, labels_T, mask_TM)
        return logits_TM

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_logits_TM: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_VH, labels_T, mask_TM = ctx.saved_tensors
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        tiles = Tiles(hidden_TH, weight_VH, labels_T, ctx.options)
        d_hidden_TH = torch.zeros_like(hidden_TH, dtype=tiles.dtype) if needs_hidden else None
        d_weight_VH = torch.zeros_like(weight_VH) if needs_weight else None
        d_logits_TM = (d_logits_TM / tiles.temperature).to(tiles.operand_dtype)
        for columns in tiles:
            place_N, at_N, column_N = tiles.positions(columns, mask_TM)
            d_logits_TC = d_logits_TM.new_zeros(len(hidden_TH), columns.stop - columns.start)
            d_logits_TC[place_N, column_N] = d_logits_TM[place_N, at_N]
            if d_hidden_TH is not None:
                tiles.add_product(d_hidden_TH, d_logits_TC, tiles.weight(columns))
            if d_weight_VH is not None:
                d_weight_VH[columns] = d_logits_TC.t() @ tiles.hidden_TH
        return None if d_hidden_TH is None else d_hidden_TH.to(hidden_TH.dtype), d_weight_VH, None, None, None
