"""How rows of published data sets become prompts with answers that the rewards accept, or are refused."""

from __future__ import annotations

from typing import Any

import pytest

from mrl.data.published import BOXED, HASHES, PUBLISHED, TAGGED
from mrl.errors import BadRow
from mrl.rewards.functions.math import countdown, gsm8k, math
from mrl.rewards.functions.text import exact_match
from mrl.rewards.sample import Sample
from tests.data.published_files import COUNTDOWN, EMPTY_BOX, GSM8K, MATH, dapo, search_r1


def sample(response: str, truth: str | list[str], **extra: Any) -> Sample:
    row = {"prompt": "?", "num_response_tokens": 1, "data_source": "test", "uid": "u", "row_id": 0}
    return Sample(response=response, ground_truth=truth, extra_info=extra, **row)


def test_gsm8k_asks_for_hashes_and_its_own_solutions_are_rewarded() -> None:
    made = [PUBLISHED["gsm8k"].read(row, "here") for row in GSM8K]
    assert [exercise.answer for exercise in made] == ["7", "1200", "-5"]
    assert made[0].question == f"Ann has 3 pens and buys 4. How many?\n\n{HASHES}"
    scores = [gsm8k(sample(row["answer"], exercise.answer)) for row, exercise in zip(GSM8K, made, strict=True)]
    assert [score["score"] for score in scores] == [1.0] * 3


def test_math_asks_for_a_box_and_its_own_solutions_are_rewarded() -> None:
    made = [PUBLISHED["math"].read(row, "here") for row in MATH]
    assert [exercise.answer for exercise in made] == ["\\frac{1}{2}", "\\left\\{ 1, {2} \\right\\}", "2"]
    assert [exercise.ability for exercise in made] == ["Algebra", "Number Theory", "Algebra"]
    assert made[0].question == f"Find $x$.\n\n{BOXED}"
    responses = [MATH[0]["solution"], MATH[1]["solution"], "\\boxed{2}"]
    scores = [math(sample(text, exercise.answer)) for text, exercise in zip(responses, made, strict=True)]
    assert [score["score"] for score in scores] == [1.0] * 3


def test_dapo_is_asked_for_a_box_as_well() -> None:
    made = PUBLISHED["dapo17k"].read(dapo("Let $n$ be.\n\nFind $n$.", "34"), "here")
    assert (made.question, made.answer) == (f"Let $n$ be.\n\nFind $n$.\n\n{BOXED}", "34")
    assert math(sample("\\boxed{34}", made.answer))["score"] == 1.0


def test_search_r1_keeps_its_words_and_every_accepted_answer() -> None:
    row = search_r1("who wrote it?", "Ann", "Ann Lee")
    made = PUBLISHED["search-r1"].read(row, "here")
    assert made.question == row["prompt"][0]["content"]
    assert (made.answer, made.data_source, made.ability) == (["Ann", "Ann Lee"], "nq", "fact-reasoning")
    asked = sample("<answer>ann lee</answer>", made.answer)
    assert exact_match(asked, tag="answer")["score"] == 1.0


def test_countdown_brings_its_numbers() -> None:
    made = [PUBLISHED["countdown"].read(row, "here") for row in COUNTDOWN]
    assert made[0].question == (
        f"Make 98 of the numbers 44, 19, 35, each used exactly once, with +, -, *, / and (). {TAGGED}"
    )
    assert [exercise.key for exercise in made] == [(98, 19, 35, 44), (24, 1, 3, 4, 6), (98, 19, 35, 44), (24, 2, 3, 4)]
    answered = sample("<answer>44 + 19 + 35</answer>", made[0].answer, **made[0].extra)
    assert countdown(answered)["score"] == 1.0


@pytest.mark.parametrize(
    ("name", "row", "what"),
    [
        ("gsm8k", {**GSM8K[0], "answer": "She has 7."}, "the solution has no answer after ####"),
        ("gsm8k", {**GSM8K[0], "question": None}, "column `question` must be a list of messages or text, not null"),
        ("math", EMPTY_BOX, "the solution's box is empty"),
        ("math", {**MATH[0], "solution": "So it is 2."}, "the solution has no boxed answer"),
        ("math", {**MATH[0], "solution": "So $\\boxed{2"}, "the solution has no boxed answer"),
        (
            "search-r1",
            search_r1("who?"),
            "column `reward_model.ground_truth.target` is an empty list, so no answer would be correct",
        ),
        ("search-r1", search_r1("who?", " "), "column `reward_model.ground_truth.target[0]` is blank"),
        ("dapo17k", dapo("Find $n$.", "3", form="{}"), "the prompt does not use the published wording"),
        ("dapo17k", dapo("Find $n$.", "3") | {"prompt": dapo("a", "")["prompt"] * 2}, "the prompt must be one message"),
        *[
            ("countdown", row, "a row must have `nums` with two or more whole numbers, and `target` with one")
            for row in (
                {"target": 98, "nums": [98]},
                {"target": 98, "nums": [44, 19.5]},
                {"target": True, "nums": [1, 2]},
                {"nums": [1, 2]},
            )
        ],
    ],
)
def test_a_row_that_is_none_is_refused_with_its_place(name: str, row: object, what: str) -> None:
    with pytest.raises(BadRow) as caught:
        PUBLISHED[name].read(row, "file:3")
    assert (caught.value.what, caught.value.where) == (what, "file:3")
