"""Competition mathematics with a short final answer."""

from __future__ import annotations

from mrl.answers import after_hashes, last_boxed
from mrl.rewards.math_answer import normal_form, same_answer
from mrl.rewards.sample import Sample


def score(sample: Sample) -> dict[str, float | str]:
    """1 where the answer in the last `\\boxed{...}` is the ground truth after normalization, else 0.

    Without a box, what stands after the last `####` is the answer. Numbers are compared exactly as fractions;
    anything else as normalized text. The ground truth may be boxed too. `found` says whether there was an answer.
    """
    answer = last_boxed(sample.response) or after_hashes(sample.response)
    if answer is None:
        return {"score": 0.0, "found": 0.0, "answer": ""}
    truth = sample.truth_text
    score = float(same_answer(answer, last_boxed(truth) or truth))
    return {"score": score, "found": 1.0, "answer": normal_form(answer).text}
