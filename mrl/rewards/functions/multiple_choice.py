"""Questions with lettered choices."""

from __future__ import annotations

import re

from mrl.answers import last_boxed
from mrl.errors import RewardError
from mrl.rewards.sample import Sample


def score(sample: Sample, letters: str = "ABCDEFGHIJ") -> dict[str, float | str]:
    r"""1 where the response chooses the ground truth's letter, else 0; letters are capitals.

    Its choice is that of the last `\boxed{C}`; else of the last "Answer: C" or "answer is (C)"; else the last `(C)`;
    else the last letter by itself that begins no sentence. The ground truth may go on behind its letter: `C. Paris`.
    `found` says whether there was a choice.
    """
    letter = f"[{re.escape(letters)}]"
    truth = re.match(rf"\W*({letter})(?!\w)", sample.truth_text)
    if truth is None:
        what = f"the ground truth {sample.ground_truth!r:.200} begins with none of the letters {letters}"
        raise RewardError(what, where=sample.name)
    choice = _choice(sample.response, letter)
    return {"score": float(choice == truth[1]), "found": float(choice is not None), "answer": choice or ""}


def _choice(response: str, letter: str) -> str | None:
    boxed = re.match(rf"(?:\\\w+\s*\{{|\W)*({letter})(?![\w'])", last_boxed(response) or "")
    if boxed:
        return boxed[1]
    wrapped = rf"(?:\\\w+\s*\{{|[^\w\n])*({letter})"
    for pattern in (
        rf"(?i:\banswer\b)(?:\s+is\b)?{wrapped}(?![\w'])(?! [a-z])",
        rf"\(({letter})\)",
        rf"(?<![\w'])({letter})(?![\w'])(?! [a-z])",  # "A dog" and "I think" choose nothing
    ):
        if found := re.findall(pattern, response):
            return str(found[-1])
    return None
