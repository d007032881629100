"""The built-in reward functions, each tested by its rule."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import resource
import subprocess
import sys
from typing import Any

import pytest

from mrl.config.reward import BUILT_IN
from mrl.config.rules.reward_options import reward_functions
from mrl.errors import RewardError
from mrl.registry import load_attribute
from mrl.rewards.functions.math import countdown, dapo, digits, gsm8k, math
from mrl.rewards.functions.text import exact_match, f1, format, length, multiple_choice, overlong
from mrl.rewards.sample import Sample


def sample(response: str = "", truth: Any = "", tokens: int = 0) -> Sample:
    return Sample(
        prompt="?",
        response=response,
        num_response_tokens=tokens,
        ground_truth=truth,
        data_source="test",
        extra_info={},
        uid="u",
        row_id=0,
    )


@pytest.mark.parametrize(
    ("response", "truth", "options", "expected"),
    [
        ("3 + 4 = 7\n#### 7", "7", {}, (1, 1)),
        ("#### $1,200.00", "#### 1200", {}, (1, 1)),
        ("#### 7 apples", "He has 3 + 4 = <<3+4=7>>7\n#### 7", {}, (1, 1)),
        ("#### 8", "7", {}, (0, 1)),
        ("#### 7\nNo: #### 8", "7", {}, (0, 1)),
        ("the answer is 7", "7", {}, (0, 0)),
        ("the answer is 7", "7", {"last_number": True}, (1, 1)),
        ("it falls to \N{MINUS SIGN}12.", -12, {"last_number": True}, (1, 1)),
        ("10-3", "3", {"last_number": True}, (1, 1)),
        ("8\n#### 7\n9", "7", {"last_number": True}, (1, 1)),
        ("it costs $1,250.50 now", "1250.5", {"last_number": True}, (1, 1)),
    ],
)
def test_gsm8k(response: str, truth: Any, options: dict[str, Any], expected: tuple[int, int]) -> None:
    scored = gsm8k(sample(response, truth), **options)
    assert (scored["score"], scored["found"]) == expected


@pytest.mark.parametrize(
    ("response", "truth", "expected"),
    [
        (" 137 ", "137", 1.0),
        ("147", "137", 0.5 * 2 / 3),
        ("37", "137", 0.5 * 2 / 3),
        ("942", "137", 0.0),
        ("-37", "137", 0.0),
        ("it is 137", "137", 0.0),
    ],
)
def test_digits(response: str, truth: str, expected: float) -> None:
    assert digits(sample(response, truth))["score"] == pytest.approx(expected)


def test_digits_of_the_answer_that_fits_best_earn_the_share_that_is_asked_for() -> None:
    assert digits(sample("137", ["942", "147"]), partial=0.9)["score"] == pytest.approx(0.9 * 2 / 3)
    assert digits(sample("137", ["942", " 137 "]), partial=0.9)["score"] == 1.0
    assert digits(sample("137", "13"), partial=0.9)["score"] == 0.0


@pytest.mark.parametrize(
    ("response", "truth", "expected"),
    [
        ("so it is $\\boxed{\\frac{1}{2}}$.", "0.5", (1, 1)),
        ("\\boxed{(1, 2]}", "$(1,2]$", (1, 1)),
        ("\\boxed{50\\%}", "\\boxed{1/2}", (1, 1)),
        ("#### 12", "12", (1, 1)),
        ("\\boxed{}", "", (0, 0)),
        ("\\boxed{4", "4", (0, 0)),
        ("#### 12 and so \\boxed{4}", "4", (1, 1)),
        ("\\boxed{4}\n#### 5", "5", (0, 1)),
    ],
)
def test_math(response: str, truth: str, expected: tuple[int, int]) -> None:
    scored = math(sample(response, truth))
    assert (scored["score"], scored["found"]) == expected


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("(1 + 3) * 4 / 6", (0.1, 1)),
        ("6 / (1 - 3 / 4)", (1, 1)),
        ("3 * 4 * (6 - 1) = 24", (0.1, 1)),
        ("-(1 - 6 / (3 / -(4)))", (0.1, 1)),
        ("6 * 4 * (3 - 1 - 1)", (0, 1)),
        ("6 / (1 - 1) + 3 + 4", (0, 0)),
        ("6 * 4 ** (3 - 1)", (0, 0)),
        ("6 // 1 + 3 * 4", (0, 0)),
        ("__import__('os').getpid() * 6 * 4 * 3 * 1", (0, 0)),
        ("True + 6 + 3 + 4", (0, 0)),
        ("6 / (1 - 3 / 4)" + " " * 200 + "+ 1", (0, 0)),
        ("(" * 90 + "6" + ")" * 90 + " / (1 - 3 / 4)", (1, 1)),
        ("6 / (1 - 3 / 4)\0", (0, 0)),
        ("", (0, 0)),
    ],
)
def test_countdown(expression: str, expected: tuple[float, int]) -> None:
    given = dataclasses.replace(sample(truth="24"), extra_info={"numbers": [1, 3, 4, 6]})
    answered = dataclasses.replace(given, response=f"<answer>no</answer> so <answer>{expression}</answer>.")
    scored = countdown(answered)
    assert (scored["score"], scored["found"]) == expected
    assert countdown(answered, partial=0.0)["score"] == float(expected[0] == 1)
    assert countdown(dataclasses.replace(given, response=expression)) == {
        "score": 0.0,
        "found": 0.0,
        "answer": "",
    }


def test_countdown_needs_its_numbers() -> None:
    with pytest.raises(RewardError, match=r"row 0 .*: extra_info has no list `numbers`"):
        countdown(sample("<answer>1</answer>", "1"))


@pytest.mark.parametrize(
    ("response", "truth", "expected"),
    [
        ("So \\boxed{C}.", "C", (1, 1)),
        ("\\boxed{\\text{(B) Rome}}", "B. Rome", (1, 1)),
        ("\\boxed{A} no: \\boxed{D}", "(D)", (1, 1)),
        ("Answer: A? No.\nThe answer is **(B)**, not (C).", "B", (1, 1)),
        ("the correct answer is $\\text{D}$", "D", (1, 1)),
        ("\\boxed{12} and Answer: B", "B", (1, 1)),
        ("I rule out (A) and choose (C).", "C", (1, 1)),
        ("A dog and I agree on D.", "D", (1, 1)),
        ("I think it's B", "B", (1, 1)),
        ("Answer: B", "C", (0, 1)),
        ("A dog. I think.", "A", (0, 0)),
        ("(K)", "A", (0, 0)),
    ],
)
def test_multiple_choice(response: str, truth: str, expected: tuple[int, int]) -> None:
    scored = multiple_choice(sample(response, truth))
    assert (scored["score"], scored["found"]) == expected


def test_choices_have_the_letters_that_are_asked_for() -> None:
    assert multiple_choice(sample("(K)", "K"), letters="JKL") == {"score": 1.0, "found": 1.0, "answer": "K"}
    for truth in ("K", "Apple", None, "3"):
        with pytest.raises(RewardError, match=r"row 0 .* does not begin with one of the letters ABCDEFGHIJ"):
            multiple_choice(sample("(A)", truth))


@pytest.mark.parametrize(
    ("response", "truth", "boxed", "expected"),
    [
        ("so\nAnswer: 34", "34", False, (1, 1)),
        ("answer : $\\boxed{34}$.", "34", False, (1, 1)),
        ("Answer: 12\nAnswer: 34", "34", False, (1, 1)),
        ("Answer: 34\nAnswer: 12", "34", False, (-1, 1)),
        ("Answer: 34" + " " * 299, "34", False, (-1, 0)),
        ("Answer: 34\n" + " " * 289, "34", False, (1, 1)),
        ("\\boxed{34}", "34", False, (-1, 0)),
        ("\\boxed{34}", "\\boxed{34}", True, (1, 1)),
        ("\\boxed{34}" + " " * 91, "34", True, (-1, 0)),
        ("\\boxed{34}" + " " * 90, "34", True, (1, 1)),
        ("Answer: 34", "34", True, (-1, 0)),
    ],
)
def test_dapo(response: str, truth: str, boxed: bool, expected: tuple[int, int]) -> None:
    scored = dapo(sample(response, truth), boxed)
    assert (scored["score"], scored["found"]) == expected
    assert scored["accuracy"] == (expected[0] == 1)


def test_prime() -> None:
    pytest.importorskip("math_verify", reason="the extra `math` is not installed")
    prime = importlib.import_module("mrl.rewards.functions.symbolic").prime
    for response, truth, expected in (
        ("\\boxed{(x+1)^2}", "x^2+2x+1", (1, 1)),
        ("\\boxed{50\\%}", "\\boxed{1/2}", (1, 1)),
        ("\\boxed{12 \\text{ apples}}", "12", (1, 1)),
        ("\\boxed{\\frac{\\sqrt{8}}{2}}", "\\sqrt{2}", (1, 1)),
        ("\\boxed{x}", "y", (0, 1)),
        ("it is 5", "5", (0, 0)),
    ):
        scored = prime(sample(response, truth))
        assert (scored["score"], scored["found"]) == expected, response


def test_math_verify() -> None:
    pytest.importorskip("math_verify", reason="the extra `math` is not installed")
    math_verify = importlib.import_module("mrl.rewards.functions.symbolic").math_verify
    assert math_verify(sample("\\boxed{(x+1)^2}", "x^2+2x+1"))["score"] == 1.0
    assert math_verify(sample("\\boxed{x}", "y")) == {"score": 0.0, "found": 1.0, "answer": "x"}
    assert math_verify(sample("no idea", "5")) == {"score": 0.0, "found": 0.0, "answer": ""}
    with pytest.raises(RewardError, match="math-verify cannot read the ground truth ''"):
        math_verify(sample("\\boxed{1}", ""))


@pytest.mark.parametrize(
    ("response", "truth", "options", "exact", "shared"),
    [
        ("The Eiffel Tower!", "eiffel tower", {}, 1, 1),
        ("Paris", ["London", "paris."], {}, 1, 1),
        ("in Paris, France", ["London", "Paris"], {}, 0, 0.5),
        ("the", "", {}, 1, 1),
        ("dog dog", "dog", {}, 0, pytest.approx(2 / 3)),
        ("42", 42, {}, 1, 1),
        ("I think <answer>Rome</answer> no <answer>Paris</answer>.", "Paris", {"tag": "answer"}, 1, 1),
        ("Paris", "Paris", {"tag": "answer"}, 0, 0),
        ("<answer>Paris", "Paris", {"tag": "answer"}, 0, 0),
    ],
)
def test_question_answering(response: str, truth: Any, options: dict[str, Any], exact: float, shared: Any) -> None:
    assert exact_match(sample(response, truth), **options)["score"] == exact
    assert f1(sample(response, truth), **options)["score"] == shared


def choice(sample: Sample) -> Any:
    """Return the score of `multiple_choice`, with a letter as the ground truth."""
    return multiple_choice(dataclasses.replace(sample, ground_truth="A"))


@pytest.mark.parametrize(
    ("function", "response", "answer"),
    [
        (gsm8k, "I think\n#### $1,200.00", "1200"),
        (math, "so \\boxed{ \\frac{1}{2} }", "1/2"),
        (math, "so #### 0.5", "1/2"),
        (digits, " 137 ", "137"),
        (digits, "it is 137", ""),
        (exact_match, "The Eiffel Tower!", "eiffel tower"),
        (f1, "the", ""),
        (dapo, "Answer: $0.50$", "0.50"),
        (choice, "I choose (C).", "C"),
    ],
)
def test_the_answer_that_was_judged_is_told_in_its_normal_form(function: Any, response: str, answer: str) -> None:
    """It votes in validation: however the rest of a response reads, and however the answer is written."""
    assert function(sample(response, "7"))["answer"] == answer


@pytest.mark.parametrize("truth", [None, [], {"a": 1}, [None]], ids=repr)
def test_f1_refuses_a_ground_truth_without_text(truth: Any) -> None:
    with pytest.raises(RewardError, match=r"^row 0 \(uid u, source test\): the ground truth"):
        f1(sample("x", truth))


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("<think>a\nb</think>\n<answer>c</answer>\n", 1),
        ("<think></think><answer>c</answer>", 0),
        ("<answer>c</answer>", 0),
        ("Well: <think>a</think><answer>c</answer>", 0),
    ],
)
def test_format(response: str, expected: float) -> None:
    assert format(sample(response)) == expected
    assert format(sample("abc"), pattern="[a-c]+") == 1


@pytest.mark.parametrize(("tokens", "expected"), [(0, 1), (100, 1), (150, 0.5), (200, 0), (900, 0)])
def test_length(tokens: int, expected: float) -> None:
    assert length(sample(tokens=tokens), target_tokens=100, max_tokens=200) == expected


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0), (80, 0), (90, -0.5), (95, -0.75), (100, -1), (120, -1)])
def test_overlong(tokens: int, expected: float) -> None:
    assert overlong(sample(tokens=tokens), max_tokens=100, buffer_tokens=20) == expected


@pytest.mark.parametrize("name", sorted(set(reward_functions()) - {"math_verify", "prime"}))
def test_the_configuration_knows_the_options(name: str) -> None:
    score = load_attribute(BUILT_IN[name])
    parameters = list(inspect.signature(score).parameters.values())[1:]
    empty = inspect.Parameter.empty
    assert {entry.name: entry.default is empty for entry in parameters} == reward_functions()[name]
    assert inspect.getdoc(score), "the docstring has the rule"


def test_a_worker_is_light() -> None:
    program = (
        "import sys, mrl.rewards.supervisor, mrl.rewards.functions.math\n"
        "heavy = {'torch', 'numpy', 'ray', 'omegaconf', 'yaml', 'sympy'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )

    def seconds() -> float:
        """Return the CPU time of the program, which does not depend on other load."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert finished.returncode == 0, finished.stderr
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(3)) < 0.3


@pytest.mark.parametrize("function", [math, gsm8k, dapo, countdown, multiple_choice])
def test_a_function_of_one_answer_refuses_several(function: Any) -> None:
    several = sample("<answer>4</answer> #### 4, so (B)", ["4", "B"])
    with pytest.raises(RewardError, match=r"one text or number as the ground truth, not \['4', 'B'\]"):
        function(dataclasses.replace(several, extra_info={"numbers": [4]}))
