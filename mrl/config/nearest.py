"""Values near a wrong one that would work: what a good error message ends with."""

from __future__ import annotations

from collections.abc import Iterable


def near_multiples(value: int, step: int) -> list[int]:
    """The multiples of `step` just below and above `value`, the nearer first."""
    below = value // step * step
    return _by_distance({below, below + step} - {0}, value)


def near_divisors(value: int, total: int, step: int = 1) -> list[int]:
    """The divisors of `total` just below and above `value`, among the multiples of `step`, the nearer first."""
    fitting = [divisor for divisor in range(step, total + 1, step) if total % divisor == 0]
    below = [divisor for divisor in fitting if divisor <= value][-1:]
    above = [divisor for divisor in fitting if divisor > value][:1]
    return _by_distance({*below, *above}, value)


def nearest(key: str, values: Iterable[int]) -> str:
    """The fix of a problem: `nearest: key=4 or 8`; nothing where no value would work."""
    listed = " or ".join(str(value) for value in values)
    return f"nearest: {key}={listed}" if listed else ""


def _by_distance(values: set[int], value: int) -> list[int]:
    return sorted(values, key=lambda candidate: (abs(candidate - value), candidate))
