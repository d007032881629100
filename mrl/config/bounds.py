"""Types of configuration values: plain types with a range or a form."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Annotated, Any


@dataclass(frozen=True)
class Bound:
    """The allowed values, in words that follow "must be", and the test for them."""

    words: str
    allows: Callable[[Any], bool]

    def __str__(self) -> str:
        return self.words


def at_least(minimum: float) -> Bound:
    return Bound(f"at least {minimum}", lambda value: value >= minimum)


def more_than(bound: float) -> Bound:
    return Bound(f"more than {bound}", lambda value: value > bound)


def matching(pattern: str, words: str) -> Bound:
    return Bound(words, lambda text: re.fullmatch(pattern, text) is not None)


Count = Annotated[int, at_least(1)]
NotNegative = Annotated[int, at_least(0)]
Seconds = Annotated[float, more_than(0)]
Share = Annotated[float, more_than(0)]
Proportion = Annotated[float, Bound("from 0 to 1", lambda value: 0 <= value <= 1)]
Amount = Annotated[float, at_least(0)]
_LINE = matching(r"(?=.*\S)[^\x00-\x1f\x7f]+", "one line of text")
Text = Annotated[str, _LINE]
Characters = Annotated[str, matching(r"(?s:.+)", "text that is not empty")]
PlainName = Annotated[
    str,
    matching(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", "a name of up to 100 letters, digits, dots, dashes and underscores"),
]


def is_path(name: str) -> bool:
    """Return whether a name has the form `package.module:attribute`."""
    module, colon, attribute = name.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), *attribute.split(".")))


@dataclass(frozen=True)
class Component(Bound):
    """Text that names a component. The user's own components are checked, and a launch takes their files along."""

    kind: str
    """Kind of component, for the problem with an unknown name. Empty if the rules of the section report it."""
    known: Collection[str]
    """Names of the built-in components."""
    is_own: Callable[[str], bool]
    """Whether a name is the user's own component, `package.module:attribute`."""


def component(kind: str, known: Collection[str]) -> Component:
    """Return the type of a name: one of `known`, or the user's own."""
    return Component(_LINE.words, _LINE.allows, kind, known, lambda name: ":" in name)


def own_component(is_own: Callable[[str], bool] = lambda name: True) -> Component:
    """Return the type of a name of which the rules of its section say what else it may be."""
    return Component(_LINE.words, _LINE.allows, "", (), is_own)
