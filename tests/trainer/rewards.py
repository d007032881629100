"""Rewards for tests."""

from __future__ import annotations

from mrl.rewards.sample import Sample


def shortness(sample: Sample) -> float:
    """Less for each token: a policy can always gain by it, whatever the model knows."""
    return 1.0 - sample.num_response_tokens / 8 + 0.1 * sample.response.count("1")
