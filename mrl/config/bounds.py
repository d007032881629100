"""The types of values in a configuration: plain types with the range or form that a value must have."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any


@dataclass(frozen=True)
class AtLeast:
    """A number that must not be smaller than `minimum`."""

    minimum: int

    def __str__(self) -> str:
        return f"at least {self.minimum}"

    def allows(self, value: Any) -> bool:
        """Whether `value` is in the range."""
        return bool(value >= self.minimum)


@dataclass(frozen=True)
class MoreThan:
    """A number that must be greater than `bound`."""

    bound: int

    def __str__(self) -> str:
        return f"more than {self.bound}"

    def allows(self, value: Any) -> bool:
        """Whether `value` is in the range."""
        return bool(value > self.bound)


@dataclass(frozen=True)
class Within:
    """A number in a range, bounds included."""

    minimum: int
    maximum: int

    def __str__(self) -> str:
        return f"from {self.minimum} to {self.maximum}"

    def allows(self, value: Any) -> bool:
        """Whether `value` is in the range."""
        return bool(self.minimum <= value <= self.maximum)


@dataclass(frozen=True)
class Matching:
    """Text of one form; `description` says which in words."""

    pattern: str
    description: str

    def __str__(self) -> str:
        return self.description

    def allows(self, value: Any) -> bool:
        """Whether `value` has the form."""
        return re.fullmatch(self.pattern, value) is not None


Count = Annotated[int, AtLeast(1)]
NotNegative = Annotated[int, AtLeast(0)]
Seconds = Annotated[float, MoreThan(0)]
Share = Annotated[float, MoreThan(0)]
Proportion = Annotated[float, Within(0, 1)]
Amount = Annotated[float, AtLeast(0)]
Text = Annotated[str, Matching(r"(?=.*\S)[^\x00-\x1f\x7f]+", "one line of text")]
PlainName = Annotated[
    str, Matching(r"[A-Za-z0-9][A-Za-z0-9._-]*", "a name of letters, digits, dots, dashes and underscores")
]
