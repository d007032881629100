"""The soft penalty of DAPO for responses that come near the length at which they are cut."""

from __future__ import annotations

from mrl.rewards.sample import Sample


def score(sample: Sample, max_tokens: int, buffer_tokens: int) -> float:
    """0 up to `max_tokens - buffer_tokens`, -1 from `max_tokens` on, and a straight line between."""
    over = sample.num_response_tokens - (max_tokens - buffer_tokens)
    return -min(1.0, max(0.0, over / buffer_tokens))
