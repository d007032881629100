"""Finding the answer between tags, and the words of an answer."""

from __future__ import annotations

import re
import string

from mrl.errors import RewardError
from mrl.rewards.sample import Sample

ANY_NUMBER = r"(?:(?<!\d)[-\u2212])?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?%?"
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def answer_in(response: str, tag: str | None) -> str:
    """Return the response, or what its last `<tag>...</tag>` holds; nothing where it has none."""
    if tag is None:
        return response
    before, close, _ = response.rpartition(f"</{tag}>")
    _, opening, inside = before.rpartition(f"<{tag}>")
    return inside if close and opening else ""


def accepted_answers(sample: Sample) -> list[str]:
    """Return the ground truth as a list of texts; Search-R1's data has it as `{"target": [...]}`."""
    truth = sample.ground_truth
    if isinstance(truth, dict) and truth.keys() == {"target"}:
        truth = truth["target"]
    accepted = truth if isinstance(truth, list) else [truth]
    if not accepted or any(not isinstance(answer, str | int | float) for answer in accepted):
        what = f"the ground truth {truth!r:.200} is neither a text nor a list of texts"
        raise RewardError(what, where=sample.name)
    return [str(answer) for answer in accepted]


def plain_words(text: str) -> list[str]:
    """Return the words of a text without case, punctuation and articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_WITHOUT_PUNCTUATION)).split()
