"""Question answering, all or nothing."""

from __future__ import annotations

from mrl.answers import answer_in, plain_words
from mrl.rewards.sample import Sample


def score(sample: Sample, tag: str | None = None) -> dict[str, float | str]:
    """1 where the answer and an accepted one have the same words, else 0.

    Case, punctuation and the articles a, an, the do not count. The ground truth is one text or a list of accepted
    ones, or has either as `target`, as Search-R1's data. The answer is the whole response, or with `tag` what the last
    `<tag>...</tag>` holds.
    """
    words = plain_words(answer_in(sample.response, tag))
    right = any(words == plain_words(accepted) for accepted in sample.accepted_answers)
    return {"score": float(right), "answer": " ".join(words)}
