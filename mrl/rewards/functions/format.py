"""Whether a response has the form that the prompt asked for."""

from __future__ import annotations

import re

from mrl.rewards.sample import Sample


def score(sample: Sample, pattern: str = r"\s*<think>.+?</think>\s*<answer>.+?</answer>\s*") -> float:
    """1 where the whole response matches the regular expression `pattern`, else 0; a dot matches line breaks."""
    return float(re.fullmatch(pattern, sample.response, re.DOTALL) is not None)
