r"""Equality of two short mathematical answers: numbers by value, everything else by normalized text.

A number may be written with thousands separators, as a decimal, a percentage, a fraction (`1/2`, `\frac12`), a mixed
number (`1\frac{1}{2}`), in scientific notation, with a currency, a degree sign or a unit. Units are removed, not
compared. A percentage equals its number and its fraction (50% = 50 = 1/2). Numbers are compared exactly: 0.333 is not
1/3. Tuples, intervals and lists keep their brackets and order, and their members are normalized one by one. Expressions
are never evaluated: 1+1 is not 2.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

_MAX_CHARACTERS = 1000  # longest answer that is normalized; a longer one is compared unchanged
_MAX_BRACKETS = 8  # nesting depth; deeper text is compared unchanged
_MAX_EXPONENT = 300

_SIGNS = {
    "\N{MINUS SIGN}": "-",
    "\N{EN DASH}": "-",
    "\N{MULTIPLICATION SIGN}": "*",
    "\N{MIDDLE DOT}": "*",
    "\N{DOT OPERATOR}": "*",
    "\N{GREEK SMALL LETTER PI}": "\\pi ",
    "\N{INFINITY}": "\\infty ",
    "\N{DEGREE SIGN}": " ",
}
_WRAPPERS = (
    r"\$\$(.*)\$\$",
    r"\$(.*[^\\$])\$",
    r"\\\((.*)\\\)",
    r"\\\[(.*)\\\]",
    r"\\(?:boxed|fbox)\s*\{(.*)\}",
)
_REWRITES = (
    (r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}", r" \1 "),
    (r"\\[dt]frac(?![A-Za-z])", r"\\frac"),
    (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\degree", " "),
    (r"\{,\}", ","),
    (r"\\[,!;:]|\\(?:left|right|displaystyle|limits)(?![A-Za-z])", ""),
    (r"\\ |~|\\q?quad(?![A-Za-z])", " "),
    (r"\\%", "%"),
    (r"\\?\$|[\u20ac\u00a3\u00a5]", ""),
)
_ASSIGNMENT = re.compile(r"[A-Za-z](?:_\w|\([a-z]\))?\s*(?:=|\\in(?![A-Za-z]))(.*\S.*)", re.DOTALL)
_PERCENT = re.compile(r"\s*(?:%|percent(?:age points?)?)$", re.IGNORECASE)

_DECIMAL = r"(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)"
_EXPONENT = r"(?:\{\s*([-+]?\d+)\s*\}|([-+]?\d+))"
_FRACTION = r"\\frac\s*(?:\{\s*(-?\d+)\s*\}\s*\{\s*(\d+)\s*\}|(\d)\s*(\d))"
_PLAIN = re.compile(rf"({_DECIMAL})(?:e([-+]?\d+))?", re.IGNORECASE)
_POWER_OF_TEN = re.compile(rf"(?:({_DECIMAL})\s*(?:\*|x|\\times|\\cdot)\s*)?10\s*\^\s*{_EXPONENT}")
_MIXED = re.compile(rf"(\d+)?\s*{_FRACTION}")
_SLASHED = re.compile(rf"(?:(\d+)\s+)?({_DECIMAL})\s*/\s*({_DECIMAL})")

_SHORT_UNITS = re.compile("mm|cm|dm|km|in|ft|yd|mi|mg|kg|lb|oz|ml|cl|hr|ms|hz|pa|kn|kw|sq|cu")
_LETTER_UNITS = frozenset("mgshl")  # only after a space: 5 m has a unit, 5m is a product
_NOT_UNITS = frozenset(
    ("and", "or", "not", "pi", "sqrt", "log", "sin", "cos", "tan", "exp", "mod", "choose", "infinity", "infty")
)
# Possessive: otherwise nested words would be tried in every combination.
_UNIT_WORDS = r"(?:[A-Za-z]++(?:\s*\^\s*\{?-?\d\}?|[\u00b2\u00b3])?+[\s./]*+)++"
_NUMBER_AND_UNIT = re.compile(rf"(.*[\d.}}])(\s*)({_UNIT_WORDS})", re.DOTALL)
_BRACKETS = ("()", "(]", "[)", "[]", "{}")


@dataclass(frozen=True)
class Answer:
    """An answer in normal form."""

    text: str
    value: Fraction | None = None
    is_percent: bool = False


def same_answer(one: str, other: str) -> bool:
    first, second = normal_form(one), normal_form(other)
    if first.value is None or second.value is None:
        return first.text == second.text != ""
    if first.is_percent != second.is_percent:
        plain, percent = (second, first) if first.is_percent else (first, second)
        return percent.value in (plain.value, plain.value * 100 if plain.value is not None else None)
    return first.value == second.value


def normal_form(answer: str, depth: int = 0) -> Answer:
    """Return the answer without irrelevant differences: wrappers, spacing, units, notation of numbers."""
    if len(answer) > _MAX_CHARACTERS or depth > _MAX_BRACKETS:
        return Answer(answer.strip())
    text = _clean(answer)
    without_percent = _PERCENT.sub("", text)
    value = _number(_without_unit(without_percent))
    if value is None:
        return Answer(_members(text, depth) or _plain_text(text))
    is_percent = without_percent != text
    return Answer(f"{value}%" if is_percent else str(value), value, is_percent)


def _clean(text: str) -> str:
    """Return the text without wrappers, LaTeX spacing, currency signs, and an assigned variable."""
    for sign, plain in _SIGNS.items():
        text = text.replace(sign, plain)
    unwrapped = ""
    while unwrapped != text:
        unwrapped = text = text.strip().rstrip(".").strip()
        for wrapper in _WRAPPERS:
            if match := re.fullmatch(wrapper, text, re.DOTALL):
                text = match[1]
    for pattern, replacement in _REWRITES:
        text = re.sub(pattern, replacement, text)
    text = text.strip()
    assigned = _ASSIGNMENT.fullmatch(text)
    return (assigned[1] if assigned else text).strip().rstrip(".")


def _without_unit(text: str) -> str:
    """Return the number without its unit, if the words after it may be a unit."""
    match = _NUMBER_AND_UNIT.fullmatch(text)
    if not match:
        return text
    number, gap, words = match[1], match[2], re.findall("[A-Za-z]+", match[3])
    return number if all(_is_unit(word, bool(gap)) for word in words) else text


def _is_unit(word: str, has_gap: bool) -> bool:
    lower = word.lower()
    if len(word) == 1:
        return has_gap and lower in _LETTER_UNITS
    return _SHORT_UNITS.fullmatch(lower) is not None or (len(word) > 2 and has_gap and lower not in _NOT_UNITS)


def _number(text: str) -> Fraction | None:
    """Return the value of a number in any notation, or None if it is not a number."""
    text = text.strip()
    sign = -1 if text.startswith("-") else 1
    size = text[1:].strip() if text[:1] in ("-", "+") else text
    if match := _PLAIN.fullmatch(size):
        value = _scaled(match[1], match[2] or "0")
    elif match := _POWER_OF_TEN.fullmatch(size):
        value = _scaled(match[1] or "1", match[2] or match[3])
    elif match := _MIXED.fullmatch(size):
        value = _mixed(match[1], match[2] or match[4], match[3] or match[5])
    elif match := _SLASHED.fullmatch(size):
        value = _mixed(match[1], match[2], match[3])
    else:
        return None
    return None if value is None else sign * value


def _scaled(decimal: str, exponent: str) -> Fraction | None:
    if len(exponent) > len(str(_MAX_EXPONENT)) + 1 or abs(int(exponent)) > _MAX_EXPONENT:
        return None  # ten billion digits are not an answer
    return Fraction(decimal.replace(",", "")) * Fraction(10) ** int(exponent)


def _mixed(whole: str | None, numerator: str, denominator: str) -> Fraction | None:
    above, below = _scaled(numerator, "0"), _scaled(denominator, "0")
    if not below or above is None:
        return None
    return Fraction(whole or 0) + above / below


def _members(text: str, depth: int) -> str | None:
    """Return a tuple, interval, set or list with each member in normal form. Return None for anything else."""
    text = text.replace("\\{", "{").replace("\\}", "}").strip()
    bracketed = text[:1] + text[-1:] in _BRACKETS and _closes_at_end(text)
    inner = text[1:-1] if bracketed else text
    members = _split(inner)
    if len(members) == 1:
        # Parentheses around a single item only group it.
        return normal_form(inner, depth + 1).text if bracketed and text[0] == "(" and text[-1] == ")" else None
    joined = ",".join(normal_form(member, depth + 1).text for member in members)
    return f"{text[0]}{joined}{text[-1]}" if bracketed else joined


def _closes_at_end(text: str) -> bool:
    depth = 0
    for position, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0:
            return position == len(text) - 1
    return False


def _split(text: str) -> list[str]:
    """Return the parts between commas outside of brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _plain_text(text: str) -> str:
    """Return expressions without spacing and multiplication signs, with braces around single characters restored."""
    text = re.sub(r"\\sqrt\s*(\d)", r"\\sqrt{\1}", text)
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\(?:cdot|times)(?![A-Za-z])|\*", "", text)
    text = re.sub(r"(\d)\s+(?=\d)", r"\1 ", text)  # 1 2 is not 12
    text = re.sub(r"(?<!\d)\s|\s(?!\d)", "", text)
    return text.lower() if text.isalpha() else text
