"""A dataset outside of mrl."""

from __future__ import annotations

from typing import Any

from tests.data.conftest import good_row


def squares(count: int) -> list[dict[str, Any]]:
    """Rows as a plain list."""
    return [good_row(number * number) for number in range(count)]
