"""Distribution of rows over data-parallel ranks by their work, and into micro-batches: within the budget, as few as
possible.

Every rank gets the same number. Plans depend only on lengths, so the driver and every rank compute the same one.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mrl.errors import BatchError
from mrl.rounding import round_up

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bins = list[list[int]]


@dataclass(frozen=True)
class RowCost:
    """Work of a row of n tokens: `linear` x n + `quadratic` x n^2, in any unit, such as FLOPs of the model's sizes."""

    linear: float
    quadratic: float

    def of(self, lengths: Integers) -> Floats:
        tokens = lengths.astype(np.float64)
        return tokens * (self.linear + self.quadratic * tokens)


@dataclass(frozen=True)
class PackingRules:
    """Constraints of micro-batches in addition to their budget, determined by a model and its layout."""

    cost: RowCost
    row_multiple: int = 1
    """Rows are stored in multiples of this many tokens (context parallelism splits them into that many pieces)."""
    pack_multiple: int = 1
    """Micro-batches are stored in multiples of this many tokens (tensor ranks may split them)."""
    count_multiple: int = 1
    """The number of micro-batches is a multiple of this (an interleaved pipeline takes them in groups)."""
    context_size: int = 1
    """Devices that share the tokens of a micro-batch, each with its own budget."""

    def capacity(self, max_tokens: int) -> int:
        """Return the stored tokens of a micro-batch if each device takes `max_tokens`."""
        return max_tokens * self.context_size // self.pack_multiple * self.pack_multiple

    def stored(self, lengths: Integers, max_tokens: int) -> Integers:
        """Return the stored tokens of each row. Raise an error if a row is larger than a micro-batch."""
        stored = round_up(lengths, self.row_multiple)
        for row in np.flatnonzero(stored > self.capacity(max_tokens))[:1].tolist():
            needed = -(-round_up(int(stored.max()), self.pack_multiple) // self.context_size)
            raise BatchError(
                f"row {row} has {lengths[row]} tokens; micro-batches hold {self.capacity(max_tokens)} "
                f"(max_tokens_per_device is {max_tokens})",
                fix=f"set max_tokens_per_device to at least {needed}, or limit the lengths of prompts and responses",
            )
        return stored


def plan_step(
    lengths: npt.ArrayLike, num_ranks: int, max_tokens: int, rules: PackingRules, groups: npt.ArrayLike | None = None
) -> list[list[Integers]]:
    """Distribute rows over ranks by their work, and pack each rank's rows into nonempty micro-batches.

    Return, for every rank, the same number of micro-batches: positions of rows, in the order of the pipeline. With
    `groups`, the numbers of consecutive rows in each group, the rows of a group stay together and in order.
    """
    checked = checked_lengths(lengths)
    stored, costs = rules.stored(checked, max_tokens), rules.cost.of(checked)
    if groups is not None:
        sizes = np.asarray(groups, dtype=np.int64)
        starts = np.cumsum(sizes) - sizes
        stored, costs = np.add.reduceat(stored, starts), np.add.reduceat(costs, starts)
        plan = _plan(stored, costs, num_ranks, max_tokens, rules, "groups")
        rows = np.split(np.arange(len(checked)), starts[1:])
        return [[np.concatenate([rows[group] for group in batch]) for batch in rank] for rank in plan]
    return _plan(stored, costs, num_ranks, max_tokens, rules)


def _plan(
    stored: Integers, costs: Floats, num_ranks: int, max_tokens: int, rules: PackingRules, unit: str = "rows"
) -> list[list[Integers]]:
    """Return the micro-batches of every rank, made of rows or of groups of rows."""
    capacity = rules.capacity(max_tokens)
    for group in np.flatnonzero(stored > capacity)[:1].tolist():  # a single row was already checked
        raise BatchError(
            f"group {group} has {stored[group]} tokens, which do not fit into one micro-batch of {capacity} "
            f"(max_tokens_per_device is {max_tokens})",
            fix=f"set max_tokens_per_device to at least {-(-int(stored.max()) // rules.context_size)}, or limit the "
            "lengths of prompts and responses",
        )
    order, sizes, work = longest_first(stored), stored.tolist(), costs.tolist()
    tight = _best_fit(order, sizes, capacity)
    count = round_up(-(-len(tight) // num_ranks), rules.count_multiple)
    if num_ranks * count > len(stored):
        raise BatchError(
            f"{len(stored)} {unit} cannot fill {count} micro-batches on each of {num_ranks} data-parallel ranks",
            fix=f"use more {unit} per update, a larger max_tokens_per_device, or fewer data-parallel ranks",
        )
    shape = (num_ranks, count)
    for weights in (work, sizes):  # of equal work, or of equal size if only that fits
        if ranks := place(order, sizes, work, weights, shape, capacity):
            break
    else:
        ranks = _dealt(tight, work, shape)
    return [[np.sort(np.asarray(rows)) for rows in _small_ends(bins, costs)] for bins in ranks]


def checked_lengths(lengths: npt.ArrayLike) -> Integers:
    """Return lengths as an array. Raise an error for a row without tokens."""
    checked = np.asarray(lengths, dtype=np.int64)
    for row in np.flatnonzero(checked < 1)[:1].tolist():
        raise BatchError(f"row {row} has {checked[row]} tokens", fix="leave out rows without tokens")
    return checked


def longest_first(tokens: Integers) -> list[int]:
    """Return the positions of rows by decreasing length. Equal lengths keep their order."""
    order = np.argsort(-tokens, kind="stable")
    return order.tolist()  # type: ignore[no-any-return]


def place(
    order: Sequence[int],
    tokens: Sequence[int],
    costs: Sequence[float],
    weights: Sequence[float],
    shape: tuple[int, int],
    capacity: int,
) -> list[Bins] | None:
    """Place rows in (ranks, bins of each) so that no bin is empty or over its capacity. Return None if that fails.

    Costs are balanced between ranks, weights between the bins of a rank: in the given order, each row goes to the rank
    with the lowest cost that has room for it, and there into the lightest bin. With the longest rows first the result
    is nearly balanced, because the shortest rows come last and even out differences.
    """
    num_ranks, num_bins = shape
    ranks = [(0.0, rank) for rank in range(num_ranks)]
    bins = [[(0.0, number, 0) for number in range(num_bins)] for _ in range(num_ranks)]
    placed: list[Bins] = [[[] for _ in range(num_bins)] for _ in range(num_ranks)]
    num_empty = num_ranks * num_bins
    for num_left, position in zip(range(len(order), 0, -1), order, strict=True):
        if num_left == num_empty:  # from here on, each row is needed for an empty bin
            ranks = [entry for entry in ranks if not bins[entry[1]][0][2]]
            heapq.heapify(ranks)
        passed_over = []
        while ranks and bins[ranks[0][1]][0][2] + tokens[position] > capacity:
            passed_over.append(heapq.heappop(ranks))
        if not ranks:
            return None
        rank_cost, rank = ranks[0]
        bin_weight, number, held = bins[rank][0]
        heapq.heapreplace(ranks, (rank_cost + costs[position], rank))
        heapq.heapreplace(bins[rank], (bin_weight + weights[position], number, held + tokens[position]))
        placed[rank][number].append(position)
        num_empty -= not held
        for entry in passed_over:
            heapq.heappush(ranks, entry)
    return placed


def _best_fit(order: Sequence[int], sizes: Sequence[int], capacity: int) -> Bins:
    """Return close to the smallest number of bins: longest row first, each into the fullest bin with enough room."""
    bins: Bins = []
    rooms: list[tuple[int, int]] = []  # remaining room and number of each bin, ascending
    for position in order:
        tokens = sizes[position]
        at = bisect.bisect_left(rooms, (tokens, 0))
        if at == len(rooms):
            bins.append([])
            rooms.append((capacity, len(bins) - 1))
        room, number = rooms.pop(at)
        bins[number].append(position)
        bisect.insort(rooms, (room - tokens, number))
    return bins


def _dealt(bins: Bins, costs: Sequence[float], shape: tuple[int, int]) -> list[Bins]:
    """Return bins that are known to fit, with the same number and similar work on each rank."""
    bins = _halved(bins, costs, shape[0] * shape[1])
    work = [sum(costs[row] for row in rows) for rows in bins]
    costliest_first = sorted(range(len(bins)), key=lambda number: -work[number])
    ranks = place(costliest_first, [1] * len(bins), work, [0.0] * len(bins), (shape[0], 1), shape[1])
    assert ranks is not None, f"{len(bins)} bins were not {shape[0]} x {shape[1]}"
    return [[bins[number] for number in numbers] for (numbers,) in ranks]


def _halved(bins: Bins, costs: Sequence[float], count: int) -> Bins:
    """Return `count` bins, by repeatedly halving the most expensive bin with at least two rows."""

    def entry(rows: list[int]) -> tuple[float, list[int]]:
        return (-sum(costs[row] for row in rows) if len(rows) > 1 else 0.0, rows)

    costliest_first = [entry(rows) for rows in bins]
    heapq.heapify(costliest_first)
    while len(costliest_first) < count:
        _, rows = heapq.heappop(costliest_first)
        heapq.heappush(costliest_first, entry(rows[::2]))
        heapq.heappush(costliest_first, entry(rows[1::2]))
    return [rows for _, rows in costliest_first]


def _small_ends(bins: Bins, costs: Floats) -> Bins:
    """Return the cheapest micro-batches first and last, the most expensive in the middle.

    While a pipeline fills and drains, most stages wait for the first and the last micro-batches.
    """
    rising = sorted(bins, key=lambda rows: (float(costs[rows].sum()), rows))
    return rising[::2] + rising[1::2][::-1]
