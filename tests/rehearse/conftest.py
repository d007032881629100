"""Tiny models, shared with the tests of the tables."""

from __future__ import annotations

from tests.models.conftest import tiny

__all__ = ["tiny"]
