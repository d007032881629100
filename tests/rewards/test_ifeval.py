"""Each check of an instruction, with a text that follows the instruction and a text that does not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from mrl.errors import RewardError
from mrl.rewards.functions.ifeval import _CHECKS, ifeval
from mrl.rewards.sample import Sample
from tests.rewards.conftest import make_sample

CASES: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    (
        "change_case:capital_word_frequency",
        {"capital_relation": "less than", "capital_frequency": 2},
        ["ONE word", "no word"],
        ["TWO WORDS"],
    ),
    ("change_case:english_capital", {}, ["ALL OF IT, 7."], ["Not all"]),
    ("change_case:english_lowercase", {}, ["all of it, 7."], ["Not all"]),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it. "}, ["\nsay it.\nDone."], ["Done. Say it."]),
    (
        "combination:two_responses",
        {},
        ["one\n******\ntwo", "******\none******two"],
        ["one", "one******one", "a******b******c"],
    ),
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        ["[name] of [town] [x]"],
        ["[name]", "[a\nb] [c]"],
    ),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, ["Bye.\nP.S. more", "p. s. more"], ["Bye."]),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, ["P.P.S. more"], ["P.S. more"]),
    ("detectable_format:constrained_response", {}, ["My answer is maybe."], ["Maybe."]),
    ("detectable_format:json_format", {}, ['{"a": 1}', "```json\n[1]\n```"], ["{a: 1}", "Here: {}"]),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        ["SECTION 1\na\nSECTION 2\nb"],
        ["SECTION 1\na", "Section 1 Section 2"],
    ),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        ["* a\n* b", "- a\n  - b\nc"],
        ["* a", "- a\n- b\n- c", "**a**\n**b**"],
    ),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        ["*one* and *two*", "**one** and *two*"],
        ["*one*", "* * and **", "**one**"],
    ),
    ("detectable_format:title", {}, ["<<An ode>>\ntext"], ["<< >>", "<An ode>"]),
    ("keywords:existence", {"keywords": ["river", "C++"]}, ["The River of c++"], ["The river"]),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, ["a category"], ["A Cat."]),
    ("keywords:frequency", {"keyword": "la", "frequency": 3, "relation": "at least"}, ["la La la"], ["la la"]),
    ("keywords:letter_frequency", {"letter": "Z", "let_frequency": 2, "let_relation": "less than"}, ["a z"], ["Zz"]),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "So"},
        ["One.\n\n'so, two", "One.\n\n\n\nSo"],
        ["One.\n\nAnd so", "One.\n\nSo\n\nthree", "So"],
    ),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        ["a\n***\nb", "a***b***"],
        ["a", "a***b***c", "a******b"],
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "at least"},
        ["One. Two!", "It costs 3.5 dollars. Really?", "One. Two"],
        ["It costs 3.5 dollars.", "Well... "],
    ),
    (
        "length_constraints:number_words",
        {"num_words": 3, "relation": "less than"},
        ["two words"],
        ["three words, here"],
    ),
    ("punctuation:no_comma", {}, ["none"], ["one, two"]),
    (
        "startend:end_checker",
        {"end_phrase": "That is all."},
        ['so "that is all."', "That is all. "],
        ["That is all. Bye"],
    ),
    ("startend:quotation", {}, [' "all of it" \n'], ['"a" b', '"']),
]


def given(response: str, names: Any, kwargs: Any) -> Sample:
    extra = {"instruction_id_list": names, "kwargs": kwargs}
    return dataclasses.replace(make_sample(), response=response, extra_info=extra)


@pytest.mark.parametrize(("name", "kwargs", "right", "wrong"), CASES, ids=[case[0] for case in CASES])
def test_each_instruction(name: str, kwargs: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    unused = {"unused": None}  # as the published rows have it
    assert [ifeval(given(text, [name], [kwargs | unused]))["score"] for text in right] == [1.0] * len(right)
    assert [ifeval(given(text, [name], [kwargs]))["score"] for text in [*wrong, " "]] == [0.0] * (len(wrong) + 1)


def test_every_instruction_has_a_case() -> None:
    assert {case[0] for case in CASES} == set(_CHECKS)


def test_all_or_a_share_of_them() -> None:
    names = ["punctuation:no_comma", "startend:quotation", "detectable_format:json_format"]
    sample = given('"good"', names, [{}, None, {}])
    assert ifeval(sample) == {"score": 1.0, "followed": 1.0}
    sample = given("good", names, [{}, {}, {}])
    assert ifeval(sample) == {"score": 0.0, "followed": pytest.approx(1 / 3)}
    assert ifeval(sample, share=True)["score"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("names", "kwargs", "message"),
    [
        (
            ["language:response_language"],
            [{"language": "ko"}],
            'no check for the instruction "language:response_language"',
        ),
        (["punctuation:no_coma"], [{}], 'did you mean "punctuation:no_comma"?'),
        (["keywords:existence"], [{}], "the kwargs of \"keywords:existence\" are invalid: KeyError('keywords')"),
        (
            ["length_constraints:number_words"],
            [{"num_words": 3, "relation": "about"}],
            'are invalid: ValueError(\'"about" is not "less than" or "at least"\')',
        ),
        (["punctuation:no_comma"], [], "no lists `instruction_id_list` and `kwargs` of the same length"),
        ([], [], "no lists `instruction_id_list` and `kwargs` of the same length"),
        (None, [{}], "no lists `instruction_id_list` and `kwargs` of the same length"),
    ],
)
def test_rows_that_cannot_be_checked_are_errors(names: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(RewardError) as caught:
        ifeval(given("text", names, kwargs))
    assert message in str(caught.value)
    assert str(caught.value).startswith("row 0 (uid u0, source unit/test): ")
