"""DAPO's scorer, compared with recorded scores of the published one for the same answers."""

from __future__ import annotations

import pytest

from mrl.rewards.functions.math import dapo
from mrl.rewards.math_answer import same_answer
from tests.rewards.test_functions import sample

NORMAL_FORMS = [
    # numbers
    ("42", "42"),
    (" 42 ", "42"),
    ("5.", "5."),
    ("0.50", "0.50"),
    ("007", "007"),
    ("1,234,567", "1234567"),
    ("1,23", "123"),
    ("1{,}234", "1234"),
    ("1,\\!234", "1234"),
    ("1\\,234", "1\\,234"),
    ("-1,234", "-1,234"),
    ("1,234.5", "1,234.5"),
    ("50\\%", "50\\%"),
    # only the assigned value, or the content of the first formula
    ("x = 5", "5"),
    ("a=b=7", "7"),
    ("n \\ge 5", "n\\ge5"),
    ("$5$", "5"),
    ("so $3$ and $4$", "3"),
    ("$\\$5.00$.", "5.00"),
    ("\\$5", "5"),
    # some units, at any position
    ("5 \\text{ cm}", "5"),
    ("5\\text{ m}^2", "5"),
    ("5 m", "5m"),
    ("5 \\mbox{ units}", "5"),
    ("90^\\circ", "90"),
    ("90^{\\circ}", "90"),
    ("10\\mathrm{th}", "10"),
    ("12 students", "12"),
    ("7 apples", "7apples"),
    ("issue", "is"),
    ("a banana", "banana"),
    # lists
    ("5 and 6", "5and6"),
    ("5 \\text{ and } 6", "56"),
    ("5, \\text{and } 6", "56"),
    ("5 or 6", "5or6"),
    ("(1, 2)", "(1,2)"),
    ("1, 2, \\ldots, 9", "129"),
    # LaTeX
    ("\\frac12", "\\frac{1}{2}"),
    ("\\frac 1 2", "\\frac{1}{2}"),
    ("\\dfrac12", "\\dfrac{1}{2}"),
    ("\\frac1{2}", "\\frac{1}{{}2}"),
    ("\\sqrt3", "\\sqrt{3}"),
    ("\\sqrt 12", "\\sqrt{1}2"),
    ("2\\sqrt{3}", "2\\sqrt{3}"),
    ("\\text{Even}", "Even"),
    ("\\textbf{(C)}", "(C)"),
    ("\\overline{AB}", "AB"),
    ("\\boxed{\\boxed{5}}", "\\boxed{5}"),
    ("\\text{a {b} c}", "{bc}"),
    ("\\left( 1,2 \\right)", "\\left(1,2\\right)"),
    # nothing
    ("square", ""),
    ("\\text{}", ""),
    ("=", ""),
]


@pytest.mark.parametrize(("answer", "expected"), NORMAL_FORMS, ids=lambda text: repr(text)[:40])
def test_normal_form(answer: str, expected: str) -> None:
    scored = dapo(sample(f"Answer: 1\nAnswer:{answer}", answer))
    assert scored["answer"] == expected
    assert scored["score"] == 1.0


def test_the_same_value_in_another_form_is_wrong() -> None:
    for answer, truth in (("0.5", "1/2"), ("5.0", "5"), ("1/2", "\\frac{1}{2}"), ("7 apples", "7"), ("even", "Even")):
        assert same_answer(answer, truth)
        assert dapo(sample(f"Answer: {answer}", truth))["score"] == -1.0


@pytest.mark.parametrize(
    ("response", "truth", "right"),
    [
        ("\\boxed{1} or \\boxed{\\frac12}", "\\frac12", True),
        ("\\boxed{\\frac12}", "\\frac{1}{2}", False),
        ("\\boxed{ 34 }", "34", False),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}", True),
        ("\\boxed{\\{}", "\\{", False),
        ("\\boxed{3} and \\boxed{4", "3", False),
        ("\\fbox{3}", "3", False),
        ("3", "", False),
    ],
)
def test_what_is_boxed_is_compared_as_it_stands(response: str, truth: str, right: bool) -> None:
    assert dapo(sample(response, truth), boxed=True)["accuracy"] == right
