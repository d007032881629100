"""A tool that agents of other frameworks also have."""

from __future__ import annotations

FACTS = {"a": "b", "b": "ocean"}


def look(key: str) -> str:
    """Look a key up.

    Args:
        key: What to look up.
    """
    return FACTS.get(key, "nothing")
