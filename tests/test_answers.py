"""Finding answers: after hashes and in boxes."""

from __future__ import annotations

import pytest

from mrl.answers import after_hashes, last_boxed


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("so \\boxed{5}.", "5"),
        ("\\boxed{1} or rather \\boxed{2}", "2"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed{\\left\\{ x \\right\\}}", "\\left\\{ x \\right\\}"),
        ("\\fbox{7}", "7"),
        ("\\boxed{never closed", None),
        ("\\boxed 5", None),
        ("5", None),
        ("", None),
    ],
)
def test_last_boxed(response: str, answer: str | None) -> None:
    assert last_boxed(response) == answer


@pytest.mark.parametrize(
    ("response", "answer"),
    [("#### 5", "5"), ("#### 4\n#### 5\nbye", "5"), ("a ####", None), ("5", None), ("#### \n\n 5 ", "5")],
)
def test_after_hashes(response: str, answer: str | None) -> None:
    assert after_hashes(response) == answer
