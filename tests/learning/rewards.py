"""What the runs that must learn are rewarded for, and what nobody can learn."""

from __future__ import annotations

import hashlib

from mrl.rewards.sample import Sample


def digits(sample: Sample) -> float:
    """The share of the response that is digits."""
    return sum(each.isdigit() for each in sample.response) / 8


def somebody_elses(sample: Sample) -> float:
    """A score that follows from the row's number: spread like a real one, and nothing that was said changes it."""
    of_row = hashlib.blake2b(f"{sample.row_id}".encode(), digest_size=2).digest()
    return int.from_bytes(of_row, "big") % 9 / 8
