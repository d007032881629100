"""Arithmetic puzzles: an expression of given numbers that has a given value."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from fractions import Fraction

from mrl.answers import answer_in
from mrl.errors import RewardError
from mrl.rewards.sample import Sample

_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_MAX_CHARACTERS = 200


def score(sample: Sample, partial: float = 0.1) -> dict[str, float | str]:
    """1 where the last `<answer>...</answer>` uses each of `extra_info.numbers` once and has the ground truth's value.

    `partial` where it uses them so and has another value, else 0. It is made of whole numbers, + - * / and
    parentheses, divides exactly, and may go on with `=`. `found` says whether it is such an expression.
    """
    numbers = sample.extra_info.get("numbers")
    if not isinstance(numbers, list):
        raise RewardError("extra_info has no list `numbers`", where=sample.name)
    expression = answer_in(sample.response, "answer").partition("=")[0].strip()
    used: list[int] = []
    try:
        value = _value(expression, used)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return {"score": 0.0, "found": 0.0, "answer": ""}
    if sorted(used) != sorted(numbers):
        return {"score": 0.0, "found": 1.0, "answer": expression}
    score = 1.0 if value == Fraction(sample.truth_text) else partial
    return {"score": score, "found": 1.0, "answer": expression}


def _value(expression: str, used: list[int]) -> Fraction:
    """Return the exact value of an expression, and note the numbers in it."""
    if len(expression) > _MAX_CHARACTERS:
        raise ValueError(f"{len(expression)} characters; at most {_MAX_CHARACTERS}")
    return _value_of(ast.parse(expression, mode="eval").body, used)


def _value_of(node: ast.expr, used: list[int]) -> Fraction:
    match node:
        case ast.Constant(value=int(number)) if type(number) is int:
            used.append(number)
            return Fraction(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value_of(operand, used)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_value_of(left, used), _value_of(right, used))
    raise ValueError("no expression of whole numbers, + - * / and parentheses")
