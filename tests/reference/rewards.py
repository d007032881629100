"""The reward of the recorded runs; the text and the right answer decide it, so that every row's can be recomputed."""

from __future__ import annotations

from mrl.rewards.sample import Sample

FUNCTION = "likes_ones"


def likes_ones(sample: Sample) -> dict[str, float | str]:
    """For one sample."""
    return {"score": score_of(sample.response, sample.ground_truth), "answer": sample.response}


def score_of(response: str, ground_truth: str) -> float:
    """Few different ones, so that a prompt's samples often score the same; what should have been said counts too."""
    return 0.5 * (len(response) % 2) + 0.5 * ("1" in response) + 0.25 * (response[:1] == ground_truth[:1])
