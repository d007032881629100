"""Divergences between the distributions of a student and a teacher at every token, without storing their logits.

As in `vocab_head`, the vocabulary is processed in tiles, each recomputed in the backward pass, and tensor-parallel
ranks sum the results of their columns. The teacher's columns of a tile are computed together with the student's: from
the teacher's hidden states and rows of its output matrix, or from its likeliest tokens. In the second case all other
tokens count as one: their total probability by the teacher is spread like the student's, which leaves the divergence
unchanged.

Shapes: as in `vocab_head`; K of the likeliest tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mrl.algos.kl import divergence
from mrl.engine.vocab_head import HeadOptions, Tiles


@dataclass(frozen=True)
class LikeliestTokens:
    """A teacher's K likeliest tokens at each place, and the log-probability of the rest."""

    ids_TK: Tensor
    log_probs_TK: Tensor
    rest_T: Tensor
    """Log-probability of all other tokens together; -inf if there are no others."""


@dataclass(frozen=True)
class TeacherHead:
    """A teacher's hidden states, and the rows of its output matrix for the columns of the student's rank."""

    hidden_TH: Tensor
    weight_VH: Tensor


Teacher = LikeliestTokens | TeacherHead


@torch.no_grad()
def likeliest_tokens(hidden_TH: Tensor, weight_VH: Tensor, k: int, options: HeadOptions) -> LikeliestTokens:
    """Return the k likeliest tokens at each place, on every rank of the group. Ties are broken deterministically."""
    assert k <= options.vocab, f"{k} of {options.vocab} tokens"
    tiles = _tiles(hidden_TH, weight_VH, options)
    highest_TK = hidden_TH.new_full((len(hidden_TH), k), -torch.inf, dtype=tiles.dtype)
    ids_TK = torch.zeros(highest_TK.shape, dtype=torch.int64, device=hidden_TH.device)
    for columns in tiles:
        logits_TC = tiles.logits(tiles.weight(columns))
        tile_TK, column_TK = logits_TC.topk(min(k, logits_TC.shape[1]), dim=1)
        tile_ids_TK = column_TK + (tiles.first_id + columns.start)
        highest_TK, ids_TK = _highest(torch.cat([highest_TK, tile_TK], 1), torch.cat([ids_TK, tile_ids_TK], 1), k)
    if options.group is not None:
        highest_TK, ids_TK = _highest(
            torch.cat(list(_of_ranks(highest_TK, options.group)), 1),
            torch.cat(list(_of_ranks(ids_TK, options.group)), 1),
            k,
        )
    whole_T, rest_T = _logsumexp(tiles, ids_TK, options)
    return LikeliestTokens(ids_TK, highest_TK - whole_T.unsqueeze(1), rest_T - whole_T)


def token_divergence(
    hidden_TH: Tensor, weight_VH: Tensor, teacher: Teacher, beta: float, options: HeadOptions
) -> tuple[Tensor, Tensor]:
    """Return the divergence of each token's distribution from the teacher's, and the student's probability of the
    teacher's likeliest tokens (1 if the teacher has the full vocabulary).

    `beta` is the one of `mrl.algos.kl`. As with log-probs, the gradient of `hidden_TH` is this rank's part.
    """
    result: tuple[Tensor, Tensor] = _TokenDivergence.apply(hidden_TH, weight_VH, teacher, beta, options)  # type: ignore[no-untyped-call]
    return result


class _TokenDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TH: Tensor, weight_VH: Tensor, teacher: Teacher, beta: float, options: HeadOptions
    ) -> tuple[Tensor, Tensor]:
        tiles = _tiles(hidden_TH, weight_VH, options)
        whole_T, rest_T = _logsumexp(tiles, None if isinstance(teacher, TeacherHead) else teacher.ids_TK, options)
        if isinstance(teacher, TeacherHead):
            level_T, _ = _logsumexp(_tiles(teacher.hidden_TH, teacher.weight_VH, options), None, options)
        else:
            level_T = teacher.rest_T - (rest_T - whole_T)
        log_prob_tiles = _BothTiles(tiles, whole_T, teacher, level_T, options)
        sums_2T = hidden_TH.new_zeros((2, len(hidden_TH)), dtype=tiles.dtype)
        for columns in tiles:
            parts = divergence(*log_prob_tiles.log_probs(columns, tiles.weight(columns)), beta)
            sums_2T += torch.stack([part_TC.sum(1) for part_TC in parts])
        if options.group is not None:
            dist.all_reduce(sums_2T, group=options.group)
        ctx.teacher, ctx.beta, ctx.options = teacher, beta, options
        ctx.save_for_backward(hidden_TH, weight_VH, whole_T, level_T, sums_2T[1])
        mass_T = -torch.expm1(rest_T - whole_T)
        ctx.mark_non_differentiable(mass_T)
        return sums_2T[0], mass_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_divergence_T: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_VH, whole_T, level_T, slope_T = ctx.saved_tensors
        tiles = _tiles(hidden_TH, weight_VH, ctx.options)
        log_prob_tiles = _BothTiles(tiles, whole_T, ctx.teacher, level_T, ctx.options)
        d_hidden_TH = torch.zeros_like(hidden_TH, dtype=tiles.dtype)
        d_weight_VH = torch.zeros_like(weight_VH) if ctx.needs_input_grad[1] else None
        d_T1 = (d_divergence_T / tiles.temperature).unsqueeze(1)
        for columns in tiles:
            weight_CH = tiles.weight(columns)
            log_probs_TC, teacher_TC = log_prob_tiles.log_probs(columns, weight_CH)
            _, slope_TC = divergence(log_probs_TC, teacher_TC, ctx.beta)
            d_logits_TC = (slope_TC - log_probs_TC.exp_().mul_(slope_T.unsqueeze(1))).mul_(d_T1)
            d_logits_TC = d_logits_TC.to(tiles.operand_dtype)
            tiles.add_product(d_hidden_TH, d_logits_TC, weight_CH)
            if d_weight_VH is not None:
                d_weight_VH[columns] = d_logits_TC.t() @ tiles.hidden_TH
        return d_hidden_TH.to(hidden_TH.dtype), d_weight_VH, None, None, None


class _BothTiles:
    """The tiles of student and teacher as log-probs.

    The level normalizes the teacher's logits. If the teacher has only its likeliest tokens, it turns the student's
    log-probs into the teacher's for all other tokens.
    """

    def __init__(self, tiles: Tiles, whole_T: Tensor, teacher: Teacher, level_T: Tensor, options: HeadOptions) -> None:
        self._tiles, self._teacher = tiles, teacher
        self._whole_T1, self._level_T1 = whole_T.unsqueeze(1), level_T.unsqueeze(1)
        if isinstance(teacher, TeacherHead):
            self._of_teacher = _tiles(teacher.hidden_TH, teacher.weight_VH, options)

    def log_probs(self, columns: slice, weight_CH: Tensor) -> tuple[Tensor, Tensor]:
        log_probs_TC = self._tiles.logits(weight_CH).sub_(self._whole_T1)
        if isinstance(self._teacher, TeacherHead):
            logits_TC = self._of_teacher.logits(self._of_teacher.weight(columns))
            return log_probs_TC, logits_TC.sub_(self._level_T1)
        teacher_TC = log_probs_TC + self._level_T1
        place_N, rank_N, column_N = self._tiles.positions(columns, self._teacher.ids_TK)
        teacher_TC[place_N, column_N] = self._teacher.log_probs_TK[place_N, rank_N].to(teacher_TC.dtype)
        return log_probs_TC, teacher_TC


def _tiles(hidden_TH: Tensor, weight_VH: Tensor, options: HeadOptions) -> Tiles:
    no_labels_T = torch.full(hidden_TH.shape[:1], -1, device=hidden_TH.device)
    return Tiles(hidden_TH, weight_VH, no_labels_T, options)


def _logsumexp(tiles: Tiles, without_TK: Tensor | None, options: HeadOptions) -> tuple[Tensor, Tensor]:
    """Return the logsumexp of the whole vocabulary, and of all tokens except these; -inf if no token remains.

    The second is summed separately: as a difference to the first it would be lost in rounding.
    """
    parts_2KT = tiles.hidden_TH.new_full((2, tiles.num_tiles, len(tiles.hidden_TH)), -torch.inf, dtype=tiles.dtype)
    for tile, columns in enumerate(tiles):
        logits_TC = tiles.logits(tiles.weight(columns))
        parts_2KT[0, tile] = logits_TC.logsumexp(1)
        if without_TK is not None:
            place_N, _, column_N = tiles.positions(columns, without_TK)
            logits_TC[place_N, column_N] = -torch.inf
            parts_2KT[1, tile] = logits_TC.logsumexp(1)
    mine_2T = parts_2KT.logsumexp(1)
    if options.group is not None:
        mine_2T = torch.stack(list(_of_ranks(mine_2T, options.group))).logsumexp(0)
    whole_T, rest_T = mine_2T.unbind(0)
    return whole_T, rest_T


def _highest(values_TN: Tensor, ids_TN: Tensor, k: int) -> tuple[Tensor, Tensor]:
    highest_TK, at_TK = values_TN.topk(k, dim=1)
    return highest_TK, ids_TN.gather(1, at_TK)


def _of_ranks(local: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    everyones = local.new_empty(group.size() * len(local), *local.shape[1:])
    dist.all_gather_into_tensor(everyones, local.contiguous(), group=group)
    return everyones.view(group.size(), *local.shape).unbind(0)
