"""Rows of tokens as one packed micro-batch: what Megatron's layers need to know about it, on this context rank.

Rows stand one after another without padding between them, except that context parallelism cuts each row into two
pieces per rank, which makes its length a multiple of 2 x cp, and that the whole must divide among the tensor ranks
when they split the sequence. What is added for that stands at the end of a row or in a row of its own, is masked by
causality, and is never read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from mrl.engine.segments import Segments
from mrl.errors import BatchError
from mrl.rounding import round_up

Lengths = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TokenRows:
    """Whole sequences: their tokens one after another, and columns with one value per *response* token.

    The response of a row is its last `response_lengths` tokens; at least one token stands before it. What is scored
    is the place before each of them, which predicts it; or its own, where the token is to be judged in its turn.
    """

    tokens: Tensor
    lengths: Lengths
    response_lengths: Lengths
    columns: Mapping[str, Tensor]
    before: bool = True

    def __post_init__(self) -> None:
        if int(self.lengths.sum()) != self.tokens.numel() or len(self.lengths) != len(self.response_lengths):
            raise BatchError(
                f"{len(self.lengths)} rows of {int(self.lengths.sum())} tokens together meet {self.tokens.numel()} "
                f"tokens and {len(self.response_lengths)} response lengths"
            )
        for row in np.flatnonzero((self.response_lengths < 0) | (self.response_lengths >= self.lengths))[:1].tolist():
            raise BatchError(
                f"row {row} has {self.response_lengths[row]} response tokens among {self.lengths[row]}",
                fix="a response may be empty, and at least one token stands before it",
            )
        for name, column in self.columns.items():
            if len(column) != self.response_lengths.sum():
                raise BatchError(
                    f"column `{name}` has {len(column)} values for {int(self.response_lengths.sum())} response tokens"
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
        )


@dataclass(frozen=True)
class SequenceSharding:
    """How ranks share a packed sequence: context size and rank, and into how many parts tensor ranks split it."""

    cp: int = 1
    cp_rank: int = 0
    sequence_parts: int = 1

    @property
    def row_multiple(self) -> int:
        """What a row's stored length is a multiple of."""
        return 2 * self.cp if self.cp > 1 else 1

    @property
    def pack_multiple(self) -> int:
        """What the stored length of a micro-batch is a multiple of."""
        return math.lcm(self.row_multiple, self.cp * self.sequence_parts)


@dataclass
class PackedParams(PackedSeqParams):  # type: ignore[misc]  # Megatron's class has no type information here
    """Megatron's description of a packed micro-batch, and ours for the own core attention."""

    segments: Segments | None = None


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch as a rank sees it.

    `tokens` are this context rank's, as Megatron's embedding takes them. `score_at` are the places among them whose
    hidden state is scored for a response token, `labels` those tokens, `score_to` their places among all response
    tokens.
    """

    rows: TokenRows
    tokens: Tensor
    params: PackedParams
    score_at: Tensor
    score_to: Tensor
    labels: Tensor

    @property
    def num_scores(self) -> int:
        """Response tokens of the whole micro-batch, on all context ranks."""
        return int(self.rows.response_lengths.sum())


def pack(rows: TokenRows, cut: SequenceSharding, device: torch.device) -> MicroBatch:
    # Rows of 5 and 3 tokens, abcde and fgh, whose responses are their last 2 and 1, on rank 1 of two context ranks:
    #   stored    8 4                        multiples of 2 x cp
    #   tokens    a b c d e . . . f g h .    of all ranks together, at places 0 to 11
    #   here      2 3 4 5 9 10               the second and the third quarter of each row are this rank's: c d e . g h
    #   answers   3 4 10                     places of the response tokens d e h
    #   score_at  0 1 4                      what stands before each, c d g, by its place among this rank's
    stored = round_up(rows.lengths, cut.row_multiple)
    missing = -int(stored.sum()) % cut.pack_multiple
    if missing or not len(stored):  # a micro-batch without rows still goes through the pipeline
        stored = np.append(stored, missing or cut.pack_multiple)
    starts = np.cumsum(stored) - stored
    tokens = torch.zeros(int(stored.sum()), dtype=torch.int64)
    tokens[_places(starts[: len(rows.lengths)], rows.lengths)] = rows.tokens.to("cpu", torch.int64)
    here = _local_places(stored, starts, cut)
    answers = _places(starts[: len(rows.lengths)] + rows.lengths - rows.response_lengths, rows.response_lengths)
    position = np.full(int(stored.sum()), -1)
    position[here] = np.arange(len(here))
    score_at = position[answers - rows.before]
    mine = np.flatnonzero(score_at >= 0)
    ends = torch.from_numpy(np.append(0, np.cumsum(stored)).astype(np.int32)).to(device)
    longest = int(stored.max())
    params = PackedParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        segments=Segments.of(stored, cut.cp, cut.cp_rank, device),
    )
    return MicroBatch(
        rows=rows,
        tokens=tokens[here].to(device)[None],
        params=params,
        score_at=torch.from_numpy(score_at[mine]).to(device),
        score_to=torch.from_numpy(mine).to(device),
        labels=tokens[answers[mine]].to(device),
    )


def _places(starts: Lengths, lengths: Lengths) -> Lengths:
    """Return all positions of the ranges [start, start + length), one range after another."""
    ends = np.cumsum(lengths)
    places: Lengths = np.repeat(starts - (ends - lengths), lengths) + np.arange(int(lengths.sum()))
    return places


def _pick(lengths: Lengths, rows: Lengths) -> Tensor:
    starts = np.cumsum(lengths) - lengths
    return torch.from_numpy(_places(starts[rows], lengths[rows]))


def _local_places(stored: Lengths, starts: Lengths, cut: SequenceSharding) -> Lengths:
    """Where this context rank's tokens stand: of every row the piece of its rank, and its mirror image from the end."""
    if cut.cp == 1:
        return np.arange(int(stored.sum()))
    piece = stored // (2 * cut.cp)
    first, second = starts + cut.cp_rank * piece, starts + (2 * cut.cp - 1 - cut.cp_rank) * piece
    return _places(np.stack([first, second], 1).reshape(-1), np.repeat(piece, 2))


def concat(parts: Sequence[Tensor], rows: Sequence[npt.ArrayLike], lengths: Lengths) -> Tensor:
    """Values of micro-batches that hold these rows, put back into the order of all rows."""
    order = np.concatenate([np.asarray(part, dtype=np.int64) for part in rows])
    values = torch.cat(list(parts))
    inverse = np.argsort(order, kind="stable")
    return values[_pick(lengths[order], inverse)]
