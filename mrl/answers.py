"""Finding the answer in a text, a data set's solution or a model's response, and the words of an answer."""

from __future__ import annotations

import re
import string

ANY_NUMBER = r"(?:(?<!\d)[-\u2212])?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?%?"
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def after_hashes(text: str) -> str | None:
    _, hashes, answer = text.rpartition("####")
    lines = answer.strip().splitlines()
    return lines[0].strip() if hashes and lines else None


def last_boxed(text: str) -> str | None:
    r"""Return the contents of the last `\boxed{...}` (or `\fbox`), including inner braces. Return None if it never
    closes."""
    begin = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if begin < 0:
        return None
    start = text.index("{", begin) + 1
    depth = 1
    for position in range(start, len(text)):
        if text[position - 1] == "\\" and text[position - 2 : position] != "\\\\":
            continue  # \{ and \} are braces of the answer
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start:position].strip()
    return None


def answer_in(response: str, tag: str | None) -> str:
    """Return the response, or the contents of its last `<tag>...</tag>`, or an empty string if it has none."""
    if tag is None:
        return response
    head, close, _ = response.rpartition(f"</{tag}>")
    _, opening, inside = head.rpartition(f"<{tag}>")
    return inside if close and opening else ""


def plain_words(text: str) -> list[str]:
    """Return the words of a text without case, punctuation and articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_WITHOUT_PUNCTUATION)).split()
