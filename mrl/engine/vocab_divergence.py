"""Divergences between the student's and a teacher's distribution of every token, without ever holding their logits.

As in `vocab_head` the vocabulary is walked in tiles, each made again backwards, and tensor-parallel ranks add up what
their columns give. The teacher's column of a tile is made beside the student's: from its own hidden states and rows of
its output matrix, or from its likeliest tokens. Then all other tokens count as one: the teacher's probability of them
is spread over them as the student spreads its own, which adds nothing to a divergence, and takes nothing from it.

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
    """What a teacher says of its K likeliest tokens at each place, and of all others together."""

    ids_TK: Tensor
    log_probs_TK: Tensor
    rest_T: Tensor
    """Log-probability of all others; -inf where there are none."""


@dataclass(frozen=True)
class TeacherHead:
    """A teacher's hidden states, and its output matrix: of the rows for the columns that the student's rank has."""

    hidden_TH: Tensor
    weight_VH: Tensor


Teacher = LikeliestTokens | TeacherHead


@torch.no_grad()
def likeliest_tokens(hidden_TH: Tensor, weight_VH: Tensor, k: int, options: HeadOptions) -> LikeliestTokens:
    """Return the k likeliest tokens of each place, on every rank of the group; of equals some, always the same."""
    assert k <= options.vocab, f"{k} of {options.vocab} tokens"
    tiles = _tiles(hidden_TH, weight_VH, options)
    highest_TK = hidden_TH.new_full((len(hidden_TH), k), -torch.inf, dtype=tiles.dtype)
    ids_TK = torch.zeros(highest_TK.shape, dtype=torch.int64, device=hidden_TH.device)
    for columns in tiles:
        logits_TC = tiles.logits(tiles.weight(columns))
        found_TK, column_TK = logits_TC.topk(min(k, logits_TC.shape[1]), dim=1)
        found_ids_TK = column_TK + (tiles.first_id + columns.start)
        highest_TK, ids_TK = _highest(torch.cat([highest_TK, found_TK], 1), torch.cat([ids_TK, found_ids_TK], 1), k)
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
    teacher's likeliest tokens, 1 where the teacher says all.

    `beta` is that of `mrl.algos.kl`. As with log-probs, the gradient of `hidden_TH` is this rank's part.
    """
    found: tuple[Tensor, Tensor] = _TokenDivergence.apply(hidden_TH, weight_VH, teacher, beta, options)  # type: ignore[no-untyped-call]
    return found


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
        both = _BothTiles(tiles, whole_T, teacher, level_T, options)
        sums_2T = hidden_TH.new_zeros((2, len(hidden_TH)), dtype=tiles.dtype)
        for columns in tiles:
            parts = divergence(*both.log_probs(columns, tiles.weight(columns)), beta)
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
        both = _BothTiles(tiles, whole_T, ctx.teacher, level_T, ctx.options)
        d_hidden_TH = torch.zeros_like(hidden_TH, dtype=tiles.dtype)
        d_weight_VH = torch.zeros_like(weight_VH) if ctx.needs_input_grad[1] else None
        d_T1 = (d_divergence_T / tiles.temperature).unsqueeze(1)
        for columns in tiles:
            weight_CH = tiles.weight(columns)
            log_probs_TC, teacher_TC = both.log_probs(columns, weight_CH)
            _, slope_TC = divergence(log_probs_TC, teacher_TC, ctx.beta)
            d_logits_TC = (slope_TC - log_probs_TC.exp_().mul_(slope_T.unsqueeze(1))).mul_(d_T1)
            d_logits_TC = d_logits_TC.to(tiles.operand_dtype)
            tiles.add_product(d_hidden_TH, d_logits_TC, weight_CH)
            if d_weight_VH is not None:
                d_weight_VH[columns] = d_logits_TC.t() @ tiles.hidden_TH
        return d_hidden_TH.to(hidden_TH.dtype), d_weight_VH, None, None, None


class _BothTiles:
    """The student's tiles and the teacher's, as log-probs. The level is what makes them of the teacher's logits, or of
    the student's log-probs for the teacher's of all that are not its likeliest."""

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
        place_N, rank_N, column_N = _in_tile(self._tiles, columns, self._teacher.ids_TK)
        teacher_TC[place_N, column_N] = self._teacher.log_probs_TK[place_N, rank_N].to(teacher_TC.dtype)
        return log_probs_TC, teacher_TC


def _tiles(hidden_TH: Tensor, weight_VH: Tensor, options: HeadOptions) -> Tiles:
    no_labels_T = torch.full(hidden_TH.shape[:1], -1, device=hidden_TH.device)
    return Tiles(hidden_TH, weight_VH, no_labels_T, options)


def _logsumexp(tiles: Tiles, without_TK: Tensor | None, options: HeadOptions) -> tuple[Tensor, Tensor]:
    """Return that of the whole vocabulary, and of all but these tokens: added up themselves, for a difference to the
    whole would be lost in rounding. Of none -inf."""
    parts_2KT = tiles.hidden_TH.new_full((2, tiles.num_tiles, len(tiles.hidden_TH)), -torch.inf, dtype=tiles.dtype)
    for tile, columns in enumerate(tiles):
        logits_TC = tiles.logits(tiles.weight(columns))
        parts_2KT[0, tile] = logits_TC.logsumexp(1)
        if without_TK is not None:
            place_N, _, column_N = _in_tile(tiles, columns, without_TK)
            logits_TC[place_N, column_N] = -torch.inf
            parts_2KT[1, tile] = logits_TC.logsumexp(1)
    mine_2T = parts_2KT.logsumexp(1)
    if options.group is not None:
        mine_2T = torch.stack(list(_of_ranks(mine_2T, options.group))).logsumexp(0)
    whole_T, rest_T = mine_2T.unbind(0)
    return whole_T, rest_T


def _in_tile(tiles: Tiles, columns: slice, ids_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tokens among these that are in a tile: at which place, the how manieth there, and in which column."""
    column_TK = ids_TK.long() - (tiles.first_id + columns.start)
    place_N, rank_N = ((column_TK >= 0) & (column_TK < columns.stop - columns.start)).nonzero(as_tuple=True)
    return place_N, rank_N, column_TK[place_N, rank_N]


def _highest(values_TN: Tensor, ids_TN: Tensor, k: int) -> tuple[Tensor, Tensor]:
    highest_TK, at_TK = values_TN.topk(k, dim=1)
    return highest_TK, ids_TN.gather(1, at_TK)


def _of_ranks(mine: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    everyones = mine.new_empty(group.size() * len(mine), *mine.shape[1:])
    dist.all_gather_into_tensor(everyones, mine.contiguous(), group=group)
    return everyones.view(group.size(), *mine.shape).unbind(0)
