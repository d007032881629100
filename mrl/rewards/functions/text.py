"""Responses as text: the words of an answer, the chosen letter, format and length."""

from __future__ import annotations

import re
from collections import Counter

from mrl.answers import answer_in, last_boxed, plain_words
from mrl.errors import RewardError
from mrl.rewards.sample import Sample


def exact_match(sample: Sample, tag: str | None = None) -> dict[str, float | str]:
    """Score 1 if the answer and an accepted one have the same words, else 0.

    Case, punctuation and the articles a, an, the are ignored. The ground truth is one text or a list of accepted texts,
    or has either as `target`, as in Search-R1's data. The answer is the whole response, or with `tag` the contents of
    the last `<tag>...</tag>`.
    """
    words = plain_words(answer_in(sample.response, tag))
    right = any(words == plain_words(accepted) for accepted in sample.accepted_answers)
    return {"score": float(right), "answer": " ".join(words)}


def f1(sample: Sample, tag: str | None = None) -> dict[str, float | str]:
    """Score the F1 of the answer's words against the best matching accepted answer.

    Words, accepted answers and `tag` are those of `exact_match`. If either side has no words, the score is 1 only if
    both have none.
    """
    words = plain_words(answer_in(sample.response, tag))
    best = max(_f1(words, plain_words(accepted)) for accepted in sample.accepted_answers)
    return {"score": best, "answer": " ".join(words)}


def _f1(words: list[str], accepted: list[str]) -> float:
    if not words or not accepted:
        return float(words == accepted)
    shared = sum((Counter(words) & Counter(accepted)).values())
    return 2 * shared / (len(words) + len(accepted))


def multiple_choice(sample: Sample, letters: str = "ABCDEFGHIJ") -> dict[str, float | str]:
    r"""Score 1 if the response chooses the ground truth's letter, else 0. Letters are capitals.

    The choice is taken from the last `\boxed{C}`; else from the last "Answer: C" or "answer is (C)"; else from the last
    `(C)`; else it is the last single letter that does not begin a sentence. The ground truth may continue after its
    letter: `C. Paris`. `found` is 1 if there was a choice.
    """
    letter = f"[{re.escape(letters)}]"
    truth = re.match(rf"\W*({letter})(?!\w)", sample.truth_text)
    if truth is None:
        what = f"the ground truth {sample.ground_truth!r:.200} does not begin with one of the letters {letters}"
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
        rf"(?<![\w'])({letter})(?![\w'])(?! [a-z])",  # "A dog" and "I think" are not choices
    ):
        if choices := re.findall(pattern, response):
            return str(choices[-1])
    return None


_TAG = r"</?(?:think|search|information|answer)>"
_INSIDE = rf"(?:(?!{_TAG}).)*"
_TURN = re.compile(rf"\s*<think>{_INSIDE}</think>\s*<(search|answer)>{_INSIDE}</\1>\s*", re.DOTALL)
_ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)
_CONTROL = re.compile(r"<\|[^|<>]*\|>\s*\Z")
"""A token that ends a turn. It is ignored when the form is checked."""


def search_r1(
    sample: Sample, structure: float = 0.2, final: float = 0.1, retrieval: float = 0.0
) -> dict[str, float | str]:
    """Score 1 for a right answer, minus `structure` if the form is wrong. Without a right answer, score `structure` for
    the form alone.

    The form is right if every turn thinks between `<think>` tags and then takes one action: all turns except the last
    search, and the last one answers. If the form is right but the answer is not, `retrieval` is added if a search found
    an accepted answer. If both are wrong, any answer scores `final`. Answers are compared as in `exact_match`. Answer
    and form are judged only on the model's own text, and retrieval only on the observations: examples in the prompt
    count for neither. `exact`, `valid` and `retrieved` are 1 or 0.
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


def format(sample: Sample, pattern: str = r"\s*<think>.+?</think>\s*<answer>.+?</answer>\s*") -> float:
    """Score 1 if the whole response matches the regular expression `pattern`, else 0. A dot matches line breaks."""
    return float(re.fullmatch(pattern, sample.response, re.DOTALL) is not None)


def length(sample: Sample, target_tokens: int, max_tokens: int) -> float:
    """Score 1 up to `target_tokens`, 0 from `max_tokens` on, linear in between."""
    left = (max_tokens - sample.num_response_tokens) / (max_tokens - target_tokens)
    return min(1.0, max(0.0, left))


def overlong(sample: Sample, max_tokens: int, buffer_tokens: int) -> float:
    """Score 0 up to `max_tokens - buffer_tokens`, -1 from `max_tokens` on, linear in between."""
    over = sample.num_response_tokens - (max_tokens - buffer_tokens)
    return -min(1.0, max(0.0, over / buffer_tokens))
