"""Shared by the rules of several sections: problems, and the nearest values that would work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mrl.errors import Problem


def problem(key: str, what: str, fix: str = "") -> Problem:
    """Return a problem without the origin of its key."""
    return Problem("", key, what, fix)


def nearest(key: str, values: Iterable[int]) -> str:
    """Return the fix of a problem, `nearest: key=4 or 8`, or an empty string if no value would work."""
    listed = " or ".join(map(str, values))
    return f"nearest: {key}={listed}" if listed else ""


def near_multiples(value: int, step: int) -> list[int]:
    """Return the multiples of `step` just below and above `value`, nearest first."""
    below = value // step * step
    return _by_distance({below, below + step} - {0}, value)


def near_divisors(value: int, total: int, step: int = 1) -> list[int]:
    """Return the divisors of `total` just below and above `value` that are multiples of `step`, nearest first."""
    fitting = [divisor for divisor in range(step, total + 1, step) if total % divisor == 0]
    below = [divisor for divisor in fitting if divisor <= value][-1:]
    above = [divisor for divisor in fitting if divisor > value][:1]
    return _by_distance({*below, *above}, value)


def _by_distance(values: set[int], value: int) -> list[int]:
    return sorted(values, key=lambda candidate: (abs(candidate - value), candidate))


def stays_in_a_node(key: str, tp: int, devices: int, here: int) -> Iterator[Problem]:
    """Yield a problem if a tensor-parallel group, which needs the links inside a machine, would span two machines."""
    if tp > here:
        yield problem(key, f"{tp} is more than the {here} devices of a node", nearest(key, [here]))
    elif devices > here and here % tp:
        what = f"{tp} does not divide the {here} devices of a node: some groups would span two nodes"
        yield problem(key, what, nearest(key, near_divisors(tp, here)))
