"""The reward of the recorded runs. It only depends on the text and the right answer, so it can be recomputed."""

from __future__ import annotations

from mrl.rewards.sample import Sample

FUNCTION = "likes_ones"


def likes_ones(sample: Sample) -> dict[str, float | str]:
    """Return score and answer of one sample."""
    return {"score": score_of(sample.response, sample.ground_truth), "answer": sample.response}


def score_of(response: str, ground_truth: str) -> float:
    """Return one of a few scores, so that samples of a prompt often tie. The right answer counts too."""
    return 0.5 * (len(response) % 2) + 0.5 * ("1" in response) + 0.25 * (response[:1] == ground_truth[:1])
