"""The tools `calculator`, arithmetic with its own parser, and `python`, which runs a program in a contained process."""

from __future__ import annotations

import asyncio
import math
import operator
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any, NoReturn

from mrl.rewards.contained import NO_PROGRAM
from mrl.rewards.sandbox import ContainedProgram, Limits, ProgramEnded

_TOKEN = re.compile(r"\s*((?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?|[A-Za-z]\w*|\*\*|//|[-+*/%^(),]|\S)")
_MAX_CHARACTERS, _MAX_DEPTH, _MAX_BITS, _MAX_DIGITS = 1000, 60, 4096, 100
_MEANING = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-"})  # noqa: RUF001  # variants that models write
_SUMS = {"+": operator.add, "-": operator.sub}
_PRODUCTS = {"*": operator.mul, "/": operator.truediv, "//": operator.floordiv, "%": operator.mod}
_CONSTANTS = {"pi": Fraction(math.pi), "e": Fraction(math.e)}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(math, name) for name in ("sqrt", "exp", "log", "log2", "log10", "sin", "cos", "tan")},
    "floor": math.floor,
    "ceil": math.ceil,
    "abs": abs,
    "round": lambda number, digits=Fraction(): _rounded(number, digits),
    "min": lambda *given: min(given),
    "max": lambda *given: max(given),
}


def calculator(expression: str) -> str:
    """Compute the value of an arithmetic expression.

    Args:
        expression: Numbers with + - * / // % ** and parentheses; sqrt, exp, log, log2, log10, sin, cos, tan, floor,
            ceil, round, abs, min, max; pi and e.
    """
    if len(expression) > _MAX_CHARACTERS:
        raise ValueError(f"the expression has {len(expression)} characters; at most {_MAX_CHARACTERS}")
    try:
        value = _Expression(expression).value()
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except OverflowError:
        raise ValueError("a number is too large") from None
    return str(value) if value.denominator == 1 else f"{float(value):.15g}"


class _Expression:
    """Parses an expression from left to right, and computes its value on the way."""

    def __init__(self, text: str) -> None:
        self._tokens: list[str] = [*_TOKEN.findall(text.translate(_MEANING)), ""]
        self._at = self._depth = 0

    def value(self) -> Fraction:
        value = self._sum()
        if self._next:
            self._unexpected()
        return value

    @property
    def _next(self) -> str:
        return self._tokens[self._at]

    def _take(self) -> str:
        self._at += 1
        return self._tokens[self._at - 1]

    def _unexpected(self) -> NoReturn:
        prefix = "".join(self._tokens[: self._at])[-20:]
        what = f"{self._next!r} is not expected" if self._next else "something is missing"
        raise ValueError(f"{what} after {prefix!r}")

    def _sum(self) -> Fraction:
        value = self._product()
        while self._next in _SUMS:
            value = _small(_SUMS[self._take()](value, self._product()))
        return value

    def _product(self) -> Fraction:
        value = self._signed()
        while self._next in _PRODUCTS:
            value = _small(_PRODUCTS[self._take()](value, self._signed()))
        return value

    def _signed(self) -> Fraction:
        """Parse a power with any number of signs. All nesting passes through this method."""
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise ValueError(f"the expression is nested more than {_MAX_DEPTH} deep")
        if self._next in _SUMS:
            value = -self._signed() if self._take() == "-" else self._signed()
        else:
            value = self._atom()
            if self._next in ("**", "^"):
                self._take()
                value = _power(value, self._signed())
        self._depth -= 1
        return value

    def _atom(self) -> Fraction:
        if self._next[:1].isdecimal() or self._next[:1] == "." != self._next:
            return _small(Fraction(self._take()))
        if self._next in _CONSTANTS:
            return _CONSTANTS[self._take()]
        if self._next in _FUNCTIONS:
            return self._call(self._take())
        if self._next != "(":
            self._unexpected()
        (value,) = self._inside(1)
        return value

    def _call(self, name: str) -> Fraction:
        if self._next != "(":
            self._unexpected()
        arguments = self._inside(99)
        try:
            return _small(_FUNCTIONS[name](*arguments))
        except TypeError:
            raise ValueError(f"{name} does not take {', '.join(map(str, arguments))}") from None

    def _inside(self, most: int) -> list[Fraction]:
        """Return the values between parentheses, separated by commas."""
        self._take()
        values = [self._sum()]
        while self._next == "," and len(values) < most:
            self._take()
            values.append(self._sum())
        if self._next != ")":
            self._unexpected()
        self._take()
        return values


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator > 1:
        if base < 0:
            raise ValueError("a negative number has no such power")
        return _small(float(base) ** float(exponent))
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if (bits - 1) * abs(exponent.numerator) > _MAX_BITS:
        raise OverflowError
    return Fraction(base**exponent.numerator)


def _rounded(number: Fraction, digits: Fraction) -> Fraction:
    if digits.denominator > 1 or abs(digits) > _MAX_DIGITS:
        raise ValueError(f"round takes whole digits up to {_MAX_DIGITS}")
    return round(number, int(digits))


def _small(number: Fraction | float) -> Fraction:
    value = Fraction(number)
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_BITS:
        raise OverflowError
    return value


_PROGRAMS = ThreadPoolExecutor(len(os.sched_getaffinity(0)), "programs")
"""More programs at once would only slow each of them down."""


async def python(
    code: str, *, limit_s: float = 5.0, memory_bytes: int = 512 << 20, output_bytes: int = 64 << 10
) -> str:
    """Run a Python program, and return what it prints. It has no network, and nothing is kept for the next one.

    Args:
        code: The program; only what it prints is seen.
    """
    limits = Limits(program_s=limit_s, memory_bytes=memory_bytes, output_bytes=output_bytes)
    return await asyncio.get_running_loop().run_in_executor(_PROGRAMS, _run, code, limits)


def _run(code: str, limits: Limits) -> str:
    try:
        with ContainedProgram({"program.py": code}, "", range(0), limits, keeps_errors=True) as process:
            status, output = process.rest(limits.program_s)
    except ProgramEnded as ended:
        most = {"time": f"{limits.program_s:g} s", "output": f"{limits.output_bytes} bytes"}.get(ended.reason, "it may")
        raise ValueError(f"the program was ended: it took more {ended.reason} than {most}") from None
    text = output.decode(errors="replace").rstrip("\n")
    if status == 0:
        return text or "(it has printed nothing)"
    how = f"a signal ended it ({-status})" if status < 0 else f"exit status {status}"
    raise ValueError(f"{'this is no Python program' if status == NO_PROGRAM else how}\n{text}".strip())
