"""Rows of tokens packed into one micro-batch, with the data that layers need on this context rank.

Rows follow one another without padding, with two exceptions. Context parallelism cuts each row into two pieces per
rank, which makes its length a multiple of 2 x cp. And the total length must be divisible among the tensor ranks if they
split the sequence. The padding is at the end of a row or in a separate row; causality masks it, and it is never read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mrl.engine.segments import Segments
from mrl.errors import BatchError
from mrl.rounding import round_up

Lengths = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TokenRows:
    """Whole sequences: their concatenated tokens, and columns with one value per *response* token.

    The response of a row is its last `response_lengths` tokens, after at least one other token. Each response token is
    scored at the place before it, which predicts it; or at its own place if `before` is false.
    """

    tokens: Tensor
    lengths: Lengths
    response_lengths: Lengths
    columns: Mapping[str, Tensor]
    before: bool = True
    routes: Tensor | None = None
    """Chosen experts [tokens, layers with experts, experts per token], of all tokens of a row but the last."""

    def __post_init__(self) -> None:
        if int(self.lengths.sum()) != self.tokens.numel() or len(self.lengths) != len(self.response_lengths):
            raise BatchError(
                f"{len(self.lengths)} rows have {int(self.lengths.sum())} tokens by their lengths, but there are "
                f"{self.tokens.numel()} tokens and {len(self.response_lengths)} response lengths"
            )
        for row in np.flatnonzero((self.response_lengths < 0) | (self.response_lengths >= self.lengths))[:1].tolist():
            raise BatchError(
                f"row {row} has {self.response_lengths[row]} response tokens, but {self.lengths[row]} tokens in total",
                fix="a response may be empty, but at least one token must come before it",
            )
        for name, column in self.columns.items():
            if len(column) != self.response_lengths.sum():
                raise BatchError(
                    f"column `{name}` has {len(column)} values for {int(self.response_lengths.sum())} response tokens"
                )
        if self.routes is not None and len(self.routes) != int((self.lengths - 1).sum()):
            raise BatchError(
                f"there are routes of {len(self.routes)} tokens, but the rows have {int((self.lengths - 1).sum())} "
                "tokens before their last ones"
            )

    def take(self, rows: npt.ArrayLike) -> TokenRows:
        index = np.asarray(rows, dtype=np.int64)
        answers = _pick(self.response_lengths, index)
        return TokenRows(
            self.tokens[_pick(self.lengths, index)],
            self.lengths[index],
            self.response_lengths[index],
            {name: column[answers] for name, column in self.columns.items()},
            self.before,
            None if self.routes is None else self.routes[_pick(self.lengths - 1, index)],
        )


@dataclass(frozen=True)
class SequenceSharding:
    """Partition of a packed sequence: context size and rank, and the number of parts for tensor ranks."""

    cp: int = 1
    cp_rank: int = 0
    sequence_parts: int = 1

    @property
    def row_multiple(self) -> int:
        """Number that divides the stored length of each row."""
        return 2 * self.cp if self.cp > 1 else 1

    @property
    def pack_multiple(self) -> int:
        """Number that divides the stored length of a micro-batch."""
        return math.lcm(self.row_multiple, self.cp * self.sequence_parts)


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch as a rank sees it.

    `tokens` are those of this context rank, the input of the embedding. `score_at` are the places among them
    whose hidden states are scored for a response token, `labels` these response tokens, and `score_to` their places
    among all response tokens. `routes_TLK` are the chosen experts of `tokens` on the host, or -1.
    """

    rows: TokenRows
    tokens: Tensor
    ends: Tensor
    """0, then the end of each stored row, among the tokens of all context ranks."""
    longest: int
    """Length of the longest stored row."""
    segments: Segments
    score_at: Tensor
    score_to: Tensor
    labels: Tensor
    places: Lengths
    """Places of `tokens` among the stored tokens of all context ranks."""
    routed_places: Lengths
    """Places of the tokens that have routes: all tokens of a row but the last."""
    num_stored: int
    is_padding: Tensor
    """Which of `tokens` belong to no row."""
    routes_TLK: Tensor | None = None

    @property
    def num_scores(self) -> int:
        """Number of response tokens in the whole micro-batch, on all context ranks."""
        return int(self.rows.response_lengths.sum())


def pack(rows: TokenRows, cut: SequenceSharding, device: torch.device) -> MicroBatch:
    # Rows of 5 and 3 tokens, abcde and fgh, whose responses are their last 2 and 1, on rank 1 of two context ranks:
    #   stored    8 4                        multiples of 2 x cp
    #   tokens    a b c d e . . . f g h .    of all ranks together, at places 0 to 11
    #   here      2 3 4 5 9 10               this rank has the second and third quarter of each row: c d e . g h
    #   answers   3 4 10                     places of the response tokens d e h
    #   score_at  0 1 4                      the token before each (c, d, g), by its place on this rank
    stored = round_up(rows.lengths, cut.row_multiple)
    missing = -int(stored.sum()) % cut.pack_multiple
    if missing or not len(stored):  # a micro-batch without rows still goes through the pipeline
        stored = np.append(stored, missing or cut.pack_multiple)
    starts = np.cumsum(stored) - stored
    own_places = _places(starts[: len(rows.lengths)], rows.lengths)
    tokens = torch.zeros(int(stored.sum()), dtype=torch.int64)
    tokens[own_places] = rows.tokens.to("cpu", torch.int64)
    is_padding = torch.ones(len(tokens), dtype=torch.bool)
    is_padding[own_places] = False
    local_places = _local_places(stored, starts, cut)
    routed_places = _places(starts[: len(rows.lengths)], rows.lengths - 1)
    answers = _places(starts[: len(rows.lengths)] + rows.lengths - rows.response_lengths, rows.response_lengths)
    position = np.full(int(stored.sum()), -1)
    position[local_places] = np.arange(len(local_places))
    score_at = position[answers - rows.before]
    local = np.flatnonzero(score_at >= 0)
    return MicroBatch(
        rows=rows,
        tokens=tokens[local_places].to(device)[None],
        ends=torch.from_numpy(np.append(0, np.cumsum(stored)).astype(np.int32)).to(device),
        longest=int(stored.max()),
        segments=Segments.of(stored, cut.cp, cut.cp_rank, device),
        score_at=torch.from_numpy(score_at[local]).to(device),
        score_to=torch.from_numpy(local).to(device),
        labels=tokens[answers[local]].to(device),
        places=local_places,
        routed_places=routed_places,
        num_stored=len(tokens),
        is_padding=is_padding[local_places].to(device),
        routes_TLK=_place_routes(rows, routed_places, len(tokens), local_places),
    )


def _place_routes(rows: TokenRows, routed_places: Lengths, num_stored: int, local_places: Lengths) -> Tensor | None:
    """Return the routes of this context rank's tokens, with -1 for padding and for the last token of a row."""
    if rows.routes is None:
        return None
    routes = torch.full((num_stored, *rows.routes.shape[1:]), -1, dtype=torch.int16)
    routes[routed_places] = rows.routes.to("cpu", torch.int16)
    return routes[local_places]


def _places(starts: Lengths, lengths: Lengths) -> Lengths:
    """Return all positions of the ranges [start, start + length), one range after another."""
    ends = np.cumsum(lengths)
    places: Lengths = np.repeat(starts - (ends - lengths), lengths) + np.arange(int(lengths.sum()))
    return places


def _pick(lengths: Lengths, rows: Lengths) -> Tensor:
    starts = np.cumsum(lengths) - lengths
    return torch.from_numpy(_places(starts[rows], lengths[rows]))


def _local_places(stored: Lengths, starts: Lengths, cut: SequenceSharding) -> Lengths:
    """Return the places of this context rank's tokens: from each row, the rank's piece and its mirror image."""
    if cut.cp == 1:
        return np.arange(int(stored.sum()))
    piece = stored // (2 * cut.cp)
    first, second = starts + cut.cp_rank * piece, starts + (2 * cut.cp - 1 - cut.cp_rank) * piece
    return _places(np.stack([first, second], 1).reshape(-1), np.repeat(piece, 2))


def concat(parts: Sequence[Tensor], rows: Sequence[npt.ArrayLike], lengths: Lengths) -> Tensor:
    """Return the values of micro-batches with these rows, in the order of all rows."""
    order = np.concatenate([np.asarray(part, dtype=np.int64) for part in rows])
    values = torch.cat(list(parts))
    inverse = np.argsort(order, kind="stable")
    return values[_pick(lengths[order], inverse)]
