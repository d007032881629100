"""Rounding of sizes to multiples."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Whole = TypeVar("Whole", int, "npt.NDArray[np.int64]")


def round_up(number: Whole, multiple: int) -> Whole:
    """Return the smallest multiple that is at least `number`; for an array, for each element."""
    return -(-number // multiple) * multiple
