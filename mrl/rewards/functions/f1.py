"""Question answering by shared words."""

from __future__ import annotations

from collections import Counter

from mrl.answers import answer_in, plain_words
from mrl.rewards.sample import Sample


def score(sample: Sample, tag: str | None = None) -> dict[str, float | str]:
    """The F1 of the answer's words against those of the accepted answer that it fits best.

    Words, accepted answers and `tag` are those of `exact_match`. Where either side has no words, both must have
    none to score 1.
    """
    words = plain_words(answer_in(sample.response, tag))
    best = max(_f1(words, plain_words(accepted)) for accepted in sample.accepted_answers)
    return {"score": best, "answer": " ".join(words)}


def _f1(words: list[str], accepted: list[str]) -> float:
    if not words or not accepted:
        return float(words == accepted)
    shared = sum((Counter(words) & Counter(accepted)).values())
    return 2 * shared / (len(words) + len(accepted))
