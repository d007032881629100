"""Tiny models, each made once for the whole session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

Tiny = Callable[..., Path]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """The directory of a tiny model of a family, to be read only."""
    from tests.models.tiny_models import make_tiny  # loads torch and transformers, seconds before any test is chosen

    made: dict[tuple[str, str], Path] = {}

    def directory(family: str, head: Literal["lm", "score"] = "lm") -> Path:
        if (family, head) not in made:
            made[family, head] = make_tiny(family, tmp_path_factory.mktemp(family), head=head)
        return made[family, head]

    return directory
