"""A reward function that a run must learn, and another that no run can learn."""

from __future__ import annotations

import hashlib

from mrl.rewards.sample import Sample


def digits(sample: Sample) -> float:
    """Return the share of digits in the response."""
    return sum(character.isdigit() for character in sample.response) / 8


def unrelated(sample: Sample) -> float:
    """Return a score that depends only on the row's number. It varies like a real score, but no response changes it."""
    of_row = hashlib.blake2b(f"{sample.row_id}".encode(), digest_size=2).digest()
    return int.from_bytes(of_row, "big") % 9 / 8
