"""Which queries of a packed micro-batch see which keys, as index tensors shared by all layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mrl.engine.delta_rule import RowChunks
from mrl.errors import EngineError

Lengths = npt.NDArray[np.int64]
_WASTE = 1.25  # largest ratio of a block's work to the work that its segments need


@dataclass(frozen=True)
class Block:
    """Segments of similar length, for one call of a dense attention kernel.

    Unused places contain token 0, and their results are dropped: causality hides them from all other places.
    """

    query_BS: Tensor
    key_BS: Tensor
    mask_BSS: Tensor | None  # None if plain causality is the mask
    kept: Tensor  # places of the real queries in the block


@dataclass(frozen=True)
class Segments:
    """All runs of consecutive queries of one row on this context rank.

    Without context parallelism a row is one segment. With it a row gives two, whose keys are all tokens of the row up
    to the segment's end. Keys are those of the whole micro-batch in row order; `key_order` maps them from the
    concatenated pieces of the context ranks.
    """

    query_starts: Lengths
    query_lengths: Lengths
    key_starts: Lengths
    key_lengths: Lengths
    key_order: Tensor | None
    device: torch.device

    @classmethod
    def of(cls, stored: Lengths, cp: int, cp_rank: int, device: torch.device) -> Segments:
        starts = np.cumsum(stored) - stored
        if cp == 1:
            return cls(starts, stored, starts, stored, None, device)
        piece = stored // (2 * cp)
        pieces = np.array([cp_rank, 2 * cp - 1 - cp_rank])
        query_lengths = np.repeat(piece, 2)
        key_lengths = (piece[:, None] * (pieces + 1)).reshape(-1)
        order = torch.from_numpy(_row_order(stored, piece, cp)).to(device)
        return cls(
            np.cumsum(query_lengths) - query_lengths, query_lengths, np.repeat(starts, 2), key_lengths, order, device
        )

    def blocks(self, reach: int | None) -> tuple[list[Block], Tensor]:
        """Return dense blocks, and the places of this rank's queries among the blocks' kept results.

        With a sliding window a query sees `reach` tokens before itself. All layers use the same blocks.
        """
        if reach not in self._made:
            blocks = [self._block(rows, reach) for rows in self._groups()]
            places = torch.cat([block.query_BS.reshape(-1)[block.kept] for block in blocks])
            self._made[reach] = (blocks, torch.argsort(places))
        return self._made[reach]

    @cached_property
    def _made(self) -> dict[int | None, tuple[list[Block], Tensor]]:
        return {}

    @cached_property
    def chunks(self) -> RowChunks:
        """Chunks of the rows for linear attention, which reads the tokens of a row in order."""
        if self.key_order is not None:
            raise EngineError("linear attention reads whole rows", fix="set parallel.cp=1")
        return RowChunks.of(self.query_lengths, self.device)

    def _groups(self) -> list[Lengths]:
        order = np.argsort(-(self.key_lengths * self.query_lengths), kind="stable")
        order = order[self.query_lengths[order] > 0]
        groups: list[Lengths] = []
        while len(order):
            widest = np.maximum.accumulate(self.query_lengths[order]) * np.maximum.accumulate(self.key_lengths[order])
            useful = np.cumsum(self.query_lengths[order] * self.key_lengths[order])
            fits = widest * np.arange(1, len(order) + 1) <= _WASTE * useful
            count = len(order) if fits.all() else max(1, int(np.argmin(fits)))
            groups.append(order[:count])
            order = order[count:]
        return groups

    def _block(self, rows: Lengths, reach: int | None) -> Block:
        # Segments of 2 queries with 4 keys and of 1 query with 3 keys, stored one after the other:
        #   query_BS  0 1      key_BS  0 1 2 3     kept  0 1 2 (the fourth place is unused)
        #             2 0              4 5 6 0
        #   The queries of the first see keys up to 2 and 3 of its row; the last query, of the second, sees all three.
        queries, keys = self.query_lengths[rows], self.key_lengths[rows]
        query_at, key_at = np.arange(queries.max()), np.arange(keys.max())
        real_BS = query_at < queries[:, None]
        query_BS = np.where(real_BS, self.query_starts[rows][:, None] + query_at, 0)
        key_BS = np.where(key_at < keys[:, None], self.key_starts[rows][:, None] + key_at, 0)
        mask = None
        is_seen_whole = reach is None or keys.max() <= reach + 1
        if not (is_seen_whole and np.array_equal(queries, keys)):
            # The queries are the last of the segment's keys: query i sees the keys up to its own place.
            last = ((keys - queries)[:, None] + query_at)[:, :, None]
            seen = key_at <= last
            if reach is not None:
                seen &= key_at >= last - reach
            mask = torch.from_numpy(seen).to(self.device)
        return Block(self._tensor(query_BS), self._tensor(key_BS), mask, self._tensor(np.flatnonzero(real_BS)))

    def _tensor(self, index: npt.NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(index)).to(self.device)


def _row_order(stored: Lengths, piece: Lengths, cp: int) -> Lengths:
    """Return, for every token in row order, its place among the concatenated tokens of the ranks."""
    local_total, local_starts = int(stored.sum()) // cp, (np.cumsum(stored) - stored) // cp
    places = []
    for length, size, start in zip(stored.tolist(), piece.tolist(), local_starts.tolist(), strict=True):
        at = np.arange(length)
        number = at // max(size, 1)
        owner = np.minimum(number, 2 * cp - 1 - number)
        places.append(owner * local_total + start + np.where(number >= cp, size, 0) + at - number * size)
    return np.concatenate(places)
