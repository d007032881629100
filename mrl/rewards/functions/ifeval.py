"""Instructions that a program can check, as in the IFEval data set."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from mrl.errors import RewardError, did_you_mean
from mrl.rewards.sample import Sample


def ifeval(sample: Sample, share: bool = False) -> dict[str, float]:
    """Score 1 if the response follows every instruction, else 0; with `share`, the share of instructions that it
    follows.

    `extra_info` contains `instruction_id_list` and `kwargs`, with one dictionary per instruction, as in the published
    rows. The checks are the strict ones; sentences are counted by full stops, question marks and exclamation marks.
    `followed` is the share.
    """
    names, settings = sample.extra_info.get("instruction_id_list"), sample.extra_info.get("kwargs")
    if not isinstance(names, list) or not isinstance(settings, list) or not 0 < len(names) == len(settings):
        what = "extra_info has no lists `instruction_id_list` and `kwargs` of the same length"
        raise RewardError(what, where=sample.name)
    followed = [_follows(sample, name, arguments or {}) for name, arguments in zip(names, settings, strict=True)]
    part = sum(followed) / len(followed)
    return {"score": part if share else float(all(followed)), "followed": part}


def _follows(sample: Sample, name: str, settings: Mapping[str, Any]) -> bool:
    if name not in _CHECKS:
        raise RewardError(f'no check for the instruction "{name}"', where=sample.name, fix=did_you_mean(name, _CHECKS))
    try:
        return bool(sample.response.strip()) and _CHECKS[name](sample.response, settings)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        what = f'the kwargs of "{name}" are invalid: {error!r:.100}'
        raise RewardError(what, where=sample.name) from error


def _compares(number: int, relation: str, limit: int) -> bool:
    if relation not in ("less than", "at least"):
        raise ValueError(f'"{relation}" is not "less than" or "at least"')
    return number < limit if relation == "less than" else number >= limit


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def _has(text: str, phrase: str, boundary: str = "") -> int:
    """Return how often a phrase occurs, ignoring case."""
    return len(re.findall(rf"{boundary}{re.escape(phrase)}{boundary}", text, re.IGNORECASE))


def _parts(text: str, divider: str) -> list[str]:
    """Return the parts between dividers. Return nothing if any part except the first or last is blank, so that no count
    matches."""
    parts = [part.strip() for part in text.split(divider)]
    parts = parts[not parts[0] : len(parts) - (not parts[-1])]
    return parts if all(parts) else []


def _nth_paragraph(text: str, arguments: Mapping[str, Any]) -> bool:
    paragraphs = [part.strip() for part in text.split("\n\n") if part.strip()]
    if len(paragraphs) != arguments["num_paragraphs"] or arguments["nth_paragraph"] > len(paragraphs):
        return False
    first = re.match(r"['\"]*([^\s.,?!'\"]*)", paragraphs[arguments["nth_paragraph"] - 1])
    return first is not None and first[1].lower() == str(arguments["first_word"]).lower()


def _postscript(text: str, arguments: Mapping[str, Any]) -> bool:
    marker = str(arguments["postscript_marker"])
    spaced = r"\s?".join(re.escape(letter) for letter in marker.rstrip(".") if letter != " ")
    return re.search(spaced, text, re.IGNORECASE) is not None


def _is_json(text: str) -> bool:
    fenced = re.fullmatch(r"```(?:json)?(.*)```", text.strip(), re.DOTALL | re.IGNORECASE)
    try:
        json.loads(fenced[1] if fenced else text)
    except ValueError:
        return False
    return True


_HIGHLIGHT = r"\*\*[^\n*]*[^\s*][^\n*]*\*\*|\*[^\n*]*[^\s*][^\n*]*\*"
_ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_SENTENCE = r"[^.!?]*\w[^.!?]*(?:[.!?]+(?=\s|$|[\"')])|$)"

_CHECKS: dict[str, Callable[[str, Mapping[str, Any]], bool]] = {
    "change_case:capital_word_frequency": lambda text, given: _compares(
        sum(word.isupper() for word in _words(text)), given["capital_relation"], given["capital_frequency"]
    ),
    "change_case:english_capital": lambda text, given: text.isupper(),
    "change_case:english_lowercase": lambda text, given: text.islower(),
    "combination:repeat_prompt": lambda text, given: (
        text.strip().lower().startswith(given["prompt_to_repeat"].strip().lower())
    ),
    "combination:two_responses": lambda text, given: len(parts := _parts(text, "******")) == 2 and parts[0] != parts[1],
    "detectable_content:number_placeholders": lambda text, given: (
        len(re.findall(r"\[[^\]\n]*\]", text)) >= given["num_placeholders"]
    ),
    "detectable_content:postscript": _postscript,
    "detectable_format:constrained_response": lambda text, given: any(answer in text for answer in _ANSWERS),
    "detectable_format:json_format": lambda text, given: _is_json(text),
    "detectable_format:multiple_sections": lambda text, given: (
        len(re.findall(rf"{re.escape(given['section_spliter'])}\s?\d+", text)) >= given["num_sections"]
    ),
    "detectable_format:number_bullet_lists": lambda text, given: (
        len(re.findall(r"^\s*(?:\*[^*\n]|-)", text, re.MULTILINE)) == given["num_bullets"]
    ),
    "detectable_format:number_highlighted_sections": lambda text, given: (
        len(re.findall(_HIGHLIGHT, text)) >= given["num_highlights"]
    ),
    "detectable_format:title": lambda text, given: re.search(r"<<[^\n<>]*[^\s<>][^\n<>]*>>", text) is not None,
    "keywords:existence": lambda text, given: all(_has(text, word) for word in given["keywords"]),
    "keywords:forbidden_words": lambda text, given: (
        not any(_has(text, word, r"\b") for word in given["forbidden_words"])
    ),
    "keywords:frequency": lambda text, given: _compares(
        _has(text, given["keyword"]), given["relation"], given["frequency"]
    ),
    "keywords:letter_frequency": lambda text, given: _compares(
        text.lower().count(given["letter"].lower()), given["let_relation"], given["let_frequency"]
    ),
    "length_constraints:nth_paragraph_first_word": _nth_paragraph,
    "length_constraints:number_paragraphs": lambda text, given: len(_parts(text, "***")) == given["num_paragraphs"],
    "length_constraints:number_sentences": lambda text, given: _compares(
        len(re.findall(_SENTENCE, text)), given["relation"], given["num_sentences"]
    ),
    "length_constraints:number_words": lambda text, given: _compares(
        len(_words(text)), given["relation"], given["num_words"]
    ),
    "punctuation:no_comma": lambda text, given: "," not in text,
    "startend:end_checker": lambda text, given: (
        text.strip().strip('"').lower().endswith(given["end_phrase"].strip().lower())
    ),
    "startend:quotation": lambda text, given: re.fullmatch(r'\s*".*"\s*', text, re.DOTALL) is not None,
}
"""Check of each instruction. `language:response_language` has none, because it needs a language identification
model."""
