"""Every key of the schema is read by code: a key that is never read would have no effect."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable
from pathlib import Path

import mrl
from mrl.config import schema
from mrl.config.keys import schema_keys

ROOT = Path(mrl.__file__).parent


def attributes_read(texts: Iterable[str]) -> set[str]:
    """Return the names of all attributes that the sources read."""
    nodes = (node for text in texts for node in ast.walk(ast.parse(text)))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}


def keys_of_the_schema() -> set[str]:
    sections = {schema.Config, *(key.section or key.entries for key in schema_keys())} - {None}
    declaring = {base for section in sections for base in section.__mro__}
    return {name for base in declaring for name in inspect.get_annotations(base)}


def test_every_key_is_read() -> None:
    unread = keys_of_the_schema() - attributes_read(file.read_text() for file in ROOT.rglob("*.py"))
    assert not unread, f"nothing reads {sorted(unread)}"
