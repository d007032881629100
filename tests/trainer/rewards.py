"""Rewards for tests."""

from __future__ import annotations

from zlib import crc32

from mrl.rewards.sample import Sample


def shortness(sample: Sample) -> float:
    """Return a reward that falls with each token, so that any policy can improve."""
    return 1.0 - sample.num_response_tokens / 8 + 0.1 * sample.response.count("1")


def chance(sample: Sample) -> float:
    """Another score for another response: no group of samples is without advantages."""
    return crc32(sample.response.encode()) / 2**32
