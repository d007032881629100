"""A preference for short responses."""

from __future__ import annotations

from mrl.rewards.sample import Sample


def score(sample: Sample, target_tokens: int, max_tokens: int) -> float:
    """1 up to `target_tokens`, 0 from `max_tokens` on, and a straight line between."""
    left = (max_tokens - sample.num_response_tokens) / (max_tokens - target_tokens)
    return min(1.0, max(0.0, left))
