"""Sets of times: sorted, disjoint intervals of nanoseconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Intervals = list[tuple[int, int]]


def union(*sets: Iterable[tuple[int, int]]) -> Intervals:
    """Return the times in any of the sets, which may be unsorted and overlap."""
    joined: Intervals = []
    for begin, end in sorted(interval for intervals in sets for interval in intervals if interval[0] < interval[1]):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def common(a: Intervals, b: Intervals) -> Intervals:
    """Return the times in both sets."""
    found, at = [], 0
    for begin, end in a:
        while at < len(b) and b[at][1] <= begin:
            at += 1
        for other_begin, other_end in b[at:]:
            if other_begin >= end:
                break
            found.append((max(begin, other_begin), min(end, other_end)))
    return found


def minus(a: Intervals, b: Intervals) -> Intervals:
    """Return the times in `a` that are not in `b`."""
    if not a:
        return []
    edges = [a[0][0], *(edge for interval in b for edge in interval), a[-1][1]]
    return common(a, [(begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True) if begin < end])


def seconds(intervals: Sequence[tuple[int, int]]) -> float:
    return sum(end - begin for begin, end in intervals) / 1e9
