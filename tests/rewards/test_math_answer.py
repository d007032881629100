"""The normalizer of mathematical answers, as a table."""

from __future__ import annotations

import time

import pytest

from mrl.rewards.math_answer import normal_form, same_answer

NORMAL_FORMS = [
    # whole numbers, signs, separators
    ("42", "42"),
    ("+7", "7"),
    ("-7", "-7"),
    ("- 7", "-7"),
    ("\N{MINUS SIGN}7", "-7"),
    ("\N{EN DASH}3.5", "-7/2"),
    ("1,234,567.50", "2469135/2"),
    ("1{,}000", "1000"),
    ("1\\,000\\,000", "1000000"),
    ("007", "7"),
    # decimals and trailing zeros
    ("3.50", "7/2"),
    ("3.", "3"),
    (".5", "1/2"),
    ("-0.0", "0"),
    # fractions
    ("1/2", "1/2"),
    ("0.5/2", "1/4"),
    ("\\frac{1}{2}", "1/2"),
    ("\\tfrac{3}{6}", "1/2"),
    ("\\frac12", "1/2"),
    ("-\\frac{3}{4}", "-3/4"),
    ("3/0", "3/0"),
    # mixed numbers
    ("1\\frac{1}{2}", "3/2"),
    ("2 \\frac34", "11/4"),
    ("1 1/2", "3/2"),
    ("-1 1/2", "-3/2"),
    # scientific notation
    ("1.5e3", "1500"),
    ("1.5 \\times 10^{3}", "1500"),
    ("6\\cdot10^4", "60000"),
    ("3 \N{MULTIPLICATION SIGN} 10^2", "300"),
    ("10^{-2}", "1/100"),
    ("1e999999999", "1e999999999"),
    ("10^{99999}", "10^{99999}"),
    # percentages
    ("50%", "50%"),
    ("12.5\\%", "25/2%"),
    ("50 percent", "50%"),
    # currency
    ("\\$18.50", "37/2"),
    ("\u20ac 7", "7"),
    # degrees and units
    ("90^{\\circ}", "90"),
    ("45\N{DEGREE SIGN}", "45"),
    ("5 cm", "5"),
    ("5cm", "5"),
    ("5\\text{ cm}^2", "5"),
    ("12 \\mathrm{~m/s}", "12"),
    ("60 miles per hour", "60"),
    ("5 m", "5"),
    ("5m", "5m"),
    ("5 or 6", "5or6"),
    ("2\\pi", "2\\pi"),
    ("3i", "3i"),
    # wrappers
    ("$$42$$", "42"),
    ("\\(42\\)", "42"),
    ("\\[ 42 \\]", "42"),
    ("\\boxed{\\boxed{\\frac{1}{2}}}", "1/2"),
    ("\\text{Even}", "even"),
    ("\\textbf{(C)}", "c"),
    ("\\left( \\frac12 \\right)", "1/2"),
    ("f(x) = 5", "5"),
    ("x \\in [0, 1]", "[0,1]"),
    # tuples, intervals, lists and sets stay what they are
    ("(1, 2)", "(1,2)"),
    ("(1,234)", "(1,234)"),
    ("(0.5, \\frac{1}{2}]", "(1/2,1/2]"),
    ("[-1, \\infty)", "[-1,\\infty)"),
    ("1, 2, 3", "1,2,3"),
    ("\\{3, 1\\}", "{3,1}"),
    ("((1,2),(3,4))", "((1,2),(3,4))"),
    ("(1, 2.0), (3, 4)", "(1,2),(3,4)"),
    ("[0.5, 1] , [2, 6/2]", "[1/2,1],[2,3]"),
    ("(1, 2)(3, 4.0)", "(1,2)(3,4.0)"),
    ("((\\frac12))", "1/2"),
    ("[\\frac12]", "[\\frac{1}{2}]"),
    # expressions are text
    ("2 \\cdot x + 1", "2x+1"),
    ("\\sqrt2", "\\sqrt{2}"),
    ("1  2", "1 2"),
    # nothing
    ("$$", ""),
    ("\\text{}", ""),
]


@pytest.mark.parametrize(("answer", "expected"), NORMAL_FORMS, ids=lambda text: repr(text)[:40])
def test_normal_form(answer: str, expected: str) -> None:
    assert normal_form(answer).text == expected


def test_the_normal_form_of_a_normal_form_is_itself() -> None:
    forms = [form for _, form in NORMAL_FORMS]
    assert [normal_form(form).text for form in forms] == forms


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("0.333", "1/3", False),
        ("50%", "0.5", True),
        ("50%", "50", True),
        ("50%", "\\frac12", True),
        ("50%", "5000", False),
        ("0%", "0", True),
        ("(1,2)", "(2,1)", False),
        ("(1,2)", "[1,2]", False),
        ("$1{,}234", "1234 dollars", True),
        ("", "", False),
        ("12", "1 2", False),
        ("Even", "\\text{even}", True),
        ("(1, 2.0), (3, 4)", "(1,2),(3,4)", True),
        ("(1,2),(3,4)", "(1,2),(4,3)", False),
        ("-50%", "-0.5", True),
        ("1e300", "10^{300}", True),
        ("1e301", "10^{301}", False),
        ("3 pi", "3", False),
        ("8 sqrt", "8", False),
        ("7 L", "7", True),
        ("7L", "7", False),
        ("7kg", "7 kg", True),
        ("4 k", "4", False),
        ("1,23", "123", False),
        ("2x3", "6", False),
        ("x_1 = 2.0", "2", True),
        ("ab = 2", "2", False),
        ("x", "X", True),
        ("2X", "2x", False),
    ],
)
def test_same_answer(one: str, other: str, same: bool) -> None:
    assert same_answer(one, other) is same
    assert same_answer(other, one) is same


@pytest.mark.parametrize(
    "text",
    [
        "(" * 499 + ")" * 499,
        "{[(" * 300,
        "5 " + "a" * 900 + "!",
        "5 " + "ab " * 300 + "!",
        "1" * 999,
        "1," * 499,
        "1,111" * 199 + "!",
        "\\frac{" * 160,
        "\\text{" * 160,
        "\\boxed{" * 140,
        "9" * 500 + "e" + "9" * 400,
        "10^" + "9" * 900,
        " " * 900 + "x",
        "-" * 999,
        "(" * 2_000_000,
    ],
    ids=lambda text: text[:12],
)
def test_hostile_answers_cost_little(text: str) -> None:
    begin = time.process_time()
    normal_form(text)
    assert time.process_time() - begin < 0.6
