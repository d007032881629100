"""The largest differencing method of Karmarkar and Karp for any number of sets, as a peer to compare with."""

from __future__ import annotations

import heapq
from itertools import count

import numpy as np
import numpy.typing as npt


def partition(values: npt.NDArray[np.float64], num_sets: int) -> list[npt.NDArray[np.int64]]:
    """Return the positions of the values in this many sets with similar sums. There is no limit on a set.

    Each value starts as a separate partition with all sets but one empty. The two most uneven partitions are merged
    repeatedly, the largest set of one with the smallest of the other.
    """
    numbers = count()
    heap = []
    for value in values.tolist():
        sums = np.zeros(num_sets)
        sums[0] = value
        heap.append((-value, next(numbers), sums))  # sums are decreasing; the first minus the last decides
    heapq.heapify(heap)
    merges: list[tuple[int, int, npt.NDArray[np.int64]]] = []
    while len(heap) > 1:
        (_, first, larger), (_, second, smaller) = heapq.heappop(heap), heapq.heappop(heap)
        sums = larger + smaller[::-1]
        order = np.argsort(-sums, kind="stable")
        sums = sums[order]
        merges.append((first, second, order))
        heapq.heappush(heap, (float(sums[-1] - sums[0]), next(numbers), sums))
    return _members(len(values), num_sets, merges)


def _members(
    num_values: int, num_sets: int, merges: list[tuple[int, int, npt.NDArray[np.int64]]]
) -> list[npt.NDArray[np.int64]]:
    """Follow the merges back to find the final set of each set of each partition."""
    final_sets = {num_values + len(merges) - 1: np.arange(num_sets)}
    for number in range(len(merges) - 1, -1, -1):
        first, second, order = merges[number]
        final = final_sets.pop(num_values + number)
        larger_sets = np.empty_like(final)
        larger_sets[order] = final
        final_sets[first], final_sets[second] = larger_sets, larger_sets[::-1]
    owner = np.array([final_sets[position][0] for position in range(num_values)])
    return [np.flatnonzero(owner == number) for number in range(num_sets)]
