"""Mathematics and numbers: finding the answer in a response, and judging it.

`mrl.rewards.math_answer` decides whether two answers are equal, unless a benchmark has its own rules.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

from mrl.answers import ANY_NUMBER, after_hashes, answer_in, last_boxed
from mrl.errors import RewardError
from mrl.rewards.math_answer import normal_form, same_answer
from mrl.rewards.sample import Sample


def gsm8k(sample: Sample, last_number: bool = False) -> dict[str, float | str]:
    """Score 1 if the number after the last `####` of the response equals the ground truth's, else 0.

    With `last_number`, a response without `####` is judged by the last number in it. The ground truth may be the whole
    solution of the data set, with its own `####`. `found` is 1 if there was an answer to judge.
    """
    answer = after_hashes(sample.response)
    if answer is None and last_number:
        numbers = re.findall(ANY_NUMBER, sample.response)
        answer = numbers[-1] if numbers else None
    return judged(answer, after_hashes(sample.truth_text) or sample.truth_text)


def math(sample: Sample) -> dict[str, float | str]:
    """Score 1 if the answer in the last `\\boxed{...}` equals the ground truth after normalization, else 0.

    Without a box, the answer is the text after the last `####`. Numbers are compared exactly as fractions, everything
    else as normalized text. The ground truth may be boxed too. `found` is 1 if there was an answer.
    """
    answer = last_boxed(sample.response) or after_hashes(sample.response)
    return judged(answer, last_boxed(sample.truth_text) or sample.truth_text)


def judged(answer: str | None, truth: str, same: Callable[[str, str], bool] = same_answer) -> dict[str, float | str]:
    if answer is None:
        return {"score": 0.0, "found": 0.0, "answer": ""}
    return {"score": float(same(answer, truth)), "found": 1.0, "answer": normal_form(answer).text}


def digits(sample: Sample, partial: float = 0.5) -> dict[str, float | str]:
    """Score 1 for the right number; otherwise `partial` times the share of its digits that are correct, aligned at the
    right.

    The response must be only the number. A response with too many digits scores 0.
    """
    answer = sample.response.strip()
    best = max(_share_right(answer, truth.strip(), partial) for truth in sample.accepted_answers)
    return {"score": best, "answer": answer if answer.isdecimal() else ""}


def _share_right(answer: str, truth: str, partial: float) -> float:
    if answer == truth:
        return 1.0
    if not answer.isdecimal() or len(answer) > len(truth):
        return 0.0
    right = sum(a == b for a, b in zip(reversed(answer), reversed(truth), strict=False))
    return partial * right / len(truth)


_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_MAX_CHARACTERS = 200


def countdown(sample: Sample, partial: float = 0.1) -> dict[str, float | str]:
    """Score 1 if the last `<answer>...</answer>` uses each of `extra_info.numbers` once and has the ground truth's
    value.

    Score `partial` if it uses them correctly but has another value, else 0. The expression consists of whole numbers, +
    - * / and parentheses, is evaluated exactly, and may be followed by `=`. `found` is 1 if it is such an expression.
    """
    numbers = sample.extra_info.get("numbers")
    if not isinstance(numbers, list):
        raise RewardError("extra_info has no list `numbers`", where=sample.name)
    expression = answer_in(sample.response, "answer").partition("=")[0].strip()
    used: list[int] = []
    try:
        if len(expression) > _MAX_CHARACTERS:
            raise ValueError(f"{len(expression)} characters; at most {_MAX_CHARACTERS}")
        value = _value_of(ast.parse(expression, mode="eval").body, used)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return {"score": 0.0, "found": 0.0, "answer": ""}
    score = 0.0
    if sorted(used) == sorted(numbers):
        score = 1.0 if value == Fraction(sample.truth_text) else partial
    return {"score": score, "found": 1.0, "answer": expression}


def _value_of(node: ast.expr, used: list[int]) -> Fraction:
    """Return the exact value of an expression, and append its numbers to `used`."""
    match node:
        case ast.Constant(value=int(number)) if type(number) is int:
            used.append(number)
            return Fraction(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value_of(operand, used)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_value_of(left, used), _value_of(right, used))
    raise ValueError("not an expression of whole numbers, + - * / and parentheses")


# DAPO compares as Minerva did: these replacements in this order.
_REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)
_REMOVED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3"),
    *("\\text{\n}", "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots"),
)
_UNWRAPPED = tuple(map(re.compile, (r"\\text\{(.*?)\}", r"\\textbf\{(.*?)\}", r"\\overline\{(.*?)\}")))
_BOXED = re.compile(r"\\boxed\{(.*)\}")


def dapo(sample: Sample, boxed: bool = False) -> dict[str, float | str]:
    r"""Score 1 if the last line `Answer: ...` within the last 300 characters gives the ground truth, else -1.

    Both are compared as text in Minerva's normal form: without some units, currency signs and spaces, `\frac12` as
    `\frac{1}{2}`, and only the text after the last `=`. 0.5 is not 1/2 here; `math` compares values. With `boxed`, the
    answer is the last `\boxed{...}` within the last 100 characters, compared unchanged; a ground truth may be boxed
    too. `accuracy` is 1 or 0, `found` is 1 if there was an answer.
    """
    truth = sample.truth_text
    if boxed:
        answer = _last_boxed(sample.response[-100:])
        is_right = answer is not None and answer in (truth, _last_boxed(truth))
    else:
        lines = re.findall(r"(?i)answer\s*:\s*([^\n]+)", sample.response[-300:])
        answer = _minerva_form(lines[-1]) if lines else None
        is_right = answer is not None and answer == _minerva_form(truth)
    figures = {"accuracy": float(is_right), "found": float(answer is not None)}
    return {"score": 1.0 if is_right else -1.0, **figures, "answer": answer or ""}


def _last_boxed(text: str) -> str | None:
    r"""Return the contents of the last `\boxed{`, unchanged. Unlike in `mrl.answers`, each brace counts, escaped or
    not."""
    _, box, rest = text.rpartition("\\boxed{")
    depth = 1
    for position, character in enumerate(rest if box else ""):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[:position]
    return None


def _minerva_form(answer: str) -> str:
    text = answer.rpartition("=")[2]
    for pattern, replacement in (*_REPLACED, *((removed, "") for removed in _REMOVED)):
        text = text.replace(pattern, replacement)
    text = "\n".join(map(_formula, text.split("\n")))
    for wrapper in (*_UNWRAPPED, _BOXED):
        text = wrapper.sub(r"\1", text)
    text = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", text)
    text = re.sub(r"sqrt([^{])", r"sqrt{\1}", text).replace("$", "")
    digits = text.replace(",", "")
    return digits if digits.isdigit() else text.strip()


def _formula(line: str) -> str:
    """Return the first formula between dollar signs, or else the whole line."""
    parts = line.split("$", 2)
    return f"${parts[1]}$" if len(parts) == 3 else line
