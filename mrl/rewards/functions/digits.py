"""A whole number, with credit for each digit that is right: easier to learn from than all or nothing."""

from __future__ import annotations

from mrl.rewards.sample import Sample


def score(sample: Sample, partial: float = 0.5) -> dict[str, float | str]:
    """1 for the right number; else `partial` times the share of its digits that stand at their places from the right.

    The response must be the number and nothing else; one that has too many digits gets nothing.
    """
    answer = sample.response.strip()
    best = max(_score(answer, truth.strip(), partial) for truth in sample.accepted_answers)
    return {"score": best, "answer": answer if answer.isdecimal() else ""}


def _score(answer: str, truth: str, partial: float) -> float:
    if answer == truth:
        return 1.0
    if not answer.isdecimal() or len(answer) > len(truth):
        return 0.0
    right = sum(a == b for a, b in zip(reversed(answer), reversed(truth), strict=False))
    return partial * right / len(truth)
