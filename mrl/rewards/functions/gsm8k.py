"""Grade-school problems that end in a number."""

from __future__ import annotations

import re

from mrl.answers import ANY_NUMBER, after_hashes
from mrl.rewards.math_answer import normal_form, same_answer
from mrl.rewards.sample import Sample


def score(sample: Sample, last_number: bool = False) -> dict[str, float | str]:
    """1 where the number after the last `####` of the response equals the ground truth's, else 0.

    With `last_number` a response without `####` is judged by the last number in it. The ground truth may be the
    whole solution of the data set, with its own `####`. `found` says whether there was an answer to judge.
    """
    answer = after_hashes(sample.response)
    if answer is None and last_number:
        found = re.findall(ANY_NUMBER, sample.response)
        answer = found[-1] if found else None
    if answer is None:
        return {"score": 0.0, "found": 0.0, "answer": ""}
    truth = sample.truth_text
    score = float(same_answer(answer, after_hashes(truth) or truth))
    return {"score": score, "found": 1.0, "answer": normal_form(answer).text}
