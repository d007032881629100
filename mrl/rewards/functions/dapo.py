"""Competition mathematics as DAPO scores it: right or wrong is +1 or -1, and only the end is read."""

from __future__ import annotations

import re

from mrl.answers import last_boxed
from mrl.rewards.math_answer import normal_form, same_answer
from mrl.rewards.sample import Sample

_END_CHARACTERS = 300
_BOXED_END_CHARACTERS = 100


def score(sample: Sample, boxed: bool = False) -> dict[str, float | str]:
    r"""1 where the last line `Answer: ...` within the last 300 characters gives the ground truth, else -1.

    With `boxed` it is the last `\boxed{...}` that lies within the last 100. Answers are compared as by `math`, so that
    another way to write the same number is right too. `accuracy` is 1 or 0, `found` whether there was an answer.
    """
    if boxed:
        answer = last_boxed(sample.response[-_BOXED_END_CHARACTERS:])
    else:
        lines = re.findall(r"(?i)answer\s*:\s*([^\n]+)", sample.response[-_END_CHARACTERS:])
        answer = lines[-1] if lines else None
    truth = str(sample.ground_truth)
    is_right = answer is not None and same_answer(answer, last_boxed(truth) or truth)
    said = "" if answer is None else normal_form(answer).text
    figures = {"accuracy": float(is_right), "found": float(answer is not None)}
    return {"score": 1.0 if is_right else -1.0, **figures, "answer": said}
