"""Rows over data-parallel ranks by the work that they really are, not by their number or their tokens."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mrl.errors import BatchError

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RowCost:
    """The work of a row of n tokens is `linear` x n + `quadratic` x n^2, in any unit: FLOPs of the model's sizes."""

    linear: float
    quadratic: float

    def of(self, lengths: Integers) -> Floats:
        """The work of each row."""
        tokens = lengths.astype(np.float64)
        return tokens * (self.linear + self.quadratic * tokens)


class RowLoad(NamedTuple):
    """What placing a row takes into account."""

    position: int
    tokens: int
    cost: float
    """What is kept equal between ranks."""
    weight: float
    """What is kept equal between the bins of a rank."""


def spread_rows(lengths: npt.ArrayLike, num_ranks: int, cost: RowCost) -> list[Integers]:
    """The positions of each rank's rows, ascending: at least one each, and the work as equal as it gets."""
    checked = checked_lengths(lengths)
    if len(checked) < num_ranks:
        raise BatchError(
            f"{len(checked)} rows cannot be spread over {num_ranks} data-parallel ranks",
            fix="give every rank at least one row: a larger batch, or fewer ranks",
        )
    costs = cost.of(checked)
    ranks = place(longest_first(checked, costs, costs), (num_ranks, 1), math.inf)
    assert ranks is not None, "bins without a limit were full"
    return [np.sort(np.asarray(positions, dtype=np.int64)) for (positions,) in ranks]


def checked_lengths(lengths: npt.ArrayLike) -> Integers:
    """Lengths as an array; every row has a token."""
    checked = np.asarray(lengths, dtype=np.int64)
    for row in np.flatnonzero(checked < 1)[:1].tolist():
        raise BatchError(f"row {row} has {checked[row]} tokens", fix="leave out rows without tokens")
    return checked


def longest_first(tokens: Integers, costs: npt.NDArray[Any], weights: npt.NDArray[Any]) -> list[RowLoad]:
    """Rows by falling length, the first of equals first."""
    order = np.argsort(-tokens, kind="stable")
    columns = (order, tokens[order], costs[order], weights[order])
    return list(map(RowLoad._make, zip(*(column.tolist() for column in columns), strict=True)))


def place(rows: Sequence[RowLoad], shape: tuple[int, int], capacity: float) -> list[list[list[int]]] | None:
    """Rows in (ranks, bins of each) so that no bin is empty or over its capacity; None where that did not succeed.

    In the order given, a row goes to the rank of the least cost that has room for it, and there into the lightest bin.
    With the longest first this ends close to equal, because the shortest come last and level what is uneven.
    """
    num_ranks, num_bins = shape
    ranks = [(0.0, rank) for rank in range(num_ranks)]
    bins = [[(0.0, number, 0) for number in range(num_bins)] for _ in range(num_ranks)]
    placed: list[list[list[int]]] = [[[] for _ in range(num_bins)] for _ in range(num_ranks)]
    num_empty = num_ranks * num_bins
    for num_left, (position, tokens, cost, weight) in zip(range(len(rows), 0, -1), rows, strict=True):
        if num_left == num_empty:  # from here on, each row is needed for a bin of its own
            ranks = [entry for entry in ranks if not bins[entry[1]][0][2]]
            heapq.heapify(ranks)
        passed_over = []
        while ranks and bins[ranks[0][1]][0][2] + tokens > capacity:
            passed_over.append(heapq.heappop(ranks))
        if not ranks:
            return None
        rank_cost, rank = ranks[0]
        bin_weight, number, held = bins[rank][0]
        heapq.heapreplace(ranks, (rank_cost + cost, rank))
        heapq.heapreplace(bins[rank], (bin_weight + weight, number, held + tokens))
        placed[rank][number].append(position)
        num_empty -= not held
        for entry in passed_over:
            heapq.heappush(ranks, entry)
    return placed
