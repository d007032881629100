"""The ranges and forms of values, at their limits."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from mrl.config.bounds import Amount, Count, NotNegative, PlainName, Proportion, Seconds, Share, Text

EDGES = [
    (Count, [1, 2], [0, -1]),
    (NotNegative, [0, 1], [-1]),
    (Seconds, [1e-9, 5.0], [0, -1.0]),
    (Share, [1e-9, 2.0], [0.0, -0.1]),
    (Proportion, [0, 0.5, 1], [-1e-9, 1 + 1e-9]),
    (Amount, [0, 1e9], [-1e-9]),
    (Text, ["x", " x", "a b"], ["", "  ", "a\nb", "a\tb", "\x7f", "a\x00"]),
    (PlainName, ["a", "A-1_2.x", "0"], ["", "-a", ".a", "_a", "a b", "a/b", "a\n", "é"]),
]


def _named(value: Any) -> str:
    return str(value if isinstance(value, list) else get_args(value)[1])


@pytest.mark.parametrize(("annotation", "allowed", "refused"), EDGES, ids=_named)
def test_a_bound_is_kept_to_its_edge(annotation: Any, allowed: list[Any], refused: list[Any]) -> None:
    bound = get_args(annotation)[1]
    assert [value for value in allowed if not bound.allows(value)] == []
    assert [value for value in refused if bound.allows(value)] == []


def test_bounds_in_words() -> None:
    texts = [str(get_args(annotation)[1]) for annotation in (Count, Seconds, Proportion, Text)]
    assert texts == ["at least 1", "more than 0", "from 0 to 1", "one line of text"]
