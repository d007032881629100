"""Types of configuration values: plain types with a range or a form."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any


@dataclass(frozen=True)
class Bound:
    """The allowed values, in words that follow "must be", and the test for them."""

    words: str
    allows: Callable[[Any], bool]

    def __str__(self) -> str:
        return self.words


def at_least(minimum: int) -> Bound:
    return Bound(f"at least {minimum}", lambda value: value >= minimum)


def more_than(bound: int) -> Bound:
    return Bound(f"more than {bound}", lambda value: value > bound)


def matching(pattern: str, words: str) -> Bound:
    return Bound(words, lambda text: re.fullmatch(pattern, text) is not None)


Count = Annotated[int, at_least(1)]
NotNegative = Annotated[int, at_least(0)]
Seconds = Annotated[float, more_than(0)]
Share = Annotated[float, more_than(0)]
Proportion = Annotated[float, Bound("from 0 to 1", lambda value: 0 <= value <= 1)]
Amount = Annotated[float, at_least(0)]
Text = Annotated[str, matching(r"(?=.*\S)[^\x00-\x1f\x7f]+", "one line of text")]
Characters = Annotated[str, matching(r"(?s:.+)", "text that is not empty")]
PlainName = Annotated[
    str,
    matching(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", "a name of up to 100 letters, digits, dots, dashes and underscores"),
]


def is_path(name: str) -> bool:
    """Return whether a name has the form `package.module:attribute`."""
    module, colon, attribute = name.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), *attribute.split(".")))
