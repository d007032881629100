"""Question answering with a search engine as Search-R1 v0.3 scores it: the answer, and the form that leads to it."""

from __future__ import annotations

import re

from mrl.answers import plain_words
from mrl.rewards.sample import Sample

_TAG = r"</?(?:think|search|information|answer)>"
_INSIDE = rf"(?:(?!{_TAG}).)*"
_TURN = re.compile(rf"\s*<think>{_INSIDE}</think>\s*<(search|answer)>{_INSIDE}</\1>\s*", re.DOTALL)
_ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)
_CONTROL = re.compile(r"<\|[^|<>]*\|>\s*\Z")
"""A token that ends a turn, which has no place in the form and is not held against it."""


def score(sample: Sample, structure: float = 0.2, final: float = 0.1, retrieval: float = 0.0) -> dict[str, float | str]:
    """1 for a right answer, less `structure` where the form is wrong; without one, `structure` for the form alone.

    The form is right where every turn thinks between `<think>` tags and then does one thing: all but the last search,
    and the last answers. Where a form is right without its answer, `retrieval` is added if a search has found an
    accepted answer; where both are wrong, to have answered at all is worth `final`. Answers are compared as
    `exact_match` does. Only what the model wrote is its answer or its form, and only what it was answered was found:
    examples in the prompt are neither. `exact`, `valid` and `retrieved` are 1 or 0.
    """
    written = [_CONTROL.sub("", text) for text in (sample.turns[::2] or [sample.response])]
    forms = [_TURN.fullmatch(text) for text in written]
    valid = [form and form[1] for form in forms] == ["search"] * (len(forms) - 1) + ["answer"]
    action = _ACTION.search(written[-1])
    answer = plain_words(action[2]) if action is not None and action[1] == "answer" else None
    accepted = [plain_words(text) for text in sample.accepted_answers]
    exact = answer in accepted
    observed = " ".join(plain_words(" ".join(sample.turns[1::2])))
    retrieved = any(" ".join(words) in observed for words in accepted if words)
    value = (structure if valid else final * (answer is not None)) + retrieval * (valid and retrieved)
    if exact:
        value = 1.0 if valid else 1.0 - structure
    figures = {"exact": float(exact), "valid": float(valid), "retrieved": float(retrieved)}
    return {"score": value, **figures, "answer": " ".join(answer or [])}
