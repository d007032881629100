"""Whether a value is what the annotation of another library's field asks for, read from its text alone."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

Alias = Callable[[str], str | None]
"""Gives the annotation that a name of the library stands for; None where it cannot be told."""
_PLAIN: dict[str, tuple[type, ...]] = {"bool": (bool,), "int": (int,), "float": (int, float), "str": (str,)}
_SEQUENCES = {"list", "List", "tuple", "Tuple", "set", "Set", "Sequence"}
_MAPPINGS = {"dict", "Dict", "Mapping"}


@dataclass(frozen=True)
class _Alternative:
    words: str
    allows: Callable[[Any], bool]


def wrong_value(annotation: str, value: Any, alias: Alias) -> str:
    """Return what a value should have been; empty where it is that, or where only the library itself could tell."""
    alternatives = list(_alternatives(ast.parse(annotation, mode="eval").body, alias))
    if any(alternative.allows(value) for alternative in alternatives):
        return ""
    *words, last = dict.fromkeys(alternative.words for alternative in alternatives)
    return f"{', '.join(words)} or {last}" if words else last


def _alternatives(node: ast.expr, alias: Alias) -> Iterator[_Alternative]:
    match node:
        case ast.Constant(value=None):
            yield _Alternative("null", lambda value: value is None)
        case ast.Constant(value=str(quoted)):
            yield from _alternatives(ast.parse(quoted, mode="eval").body, alias)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            yield from _alternatives(left, alias)
            yield from _alternatives(right, alias)
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            yield from _alternatives(inner, alias)
            yield _Alternative("null", lambda value: value is None)
        case ast.Subscript(value=ast.Name(id="Union"), slice=ast.Tuple(elts=members)):
            for member in members:
                yield from _alternatives(member, alias)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=choices):
            yield from _choices(choices)
        case ast.Subscript(value=ast.Name(id=name), slice=inner) if name in _SEQUENCES:
            yield _Alternative(f"a list ({ast.unparse(node)})", lambda value: _is_list(value, inner, alias))
        case ast.Name(id=name) | ast.Subscript(value=ast.Name(id=name)) if name in _MAPPINGS:
            yield _Alternative("a section", lambda value: isinstance(value, dict))
        case ast.Name(id=name) if name in _PLAIN:
            yield _Alternative(name, lambda value: _is_plain(name, value))
        case ast.Name(id=name) if found := alias(name):
            yield from _alternatives(ast.parse(found, mode="eval").body, alias)
        case _:
            yield _Alternative(ast.unparse(node), lambda value: True)


def _choices(node: ast.expr) -> Iterator[_Alternative]:
    for choice in node.elts if isinstance(node, ast.Tuple) else [node]:
        match choice:
            case ast.Constant(value=wanted):
                yield _Alternative(str(wanted), partial(_is_same, wanted))
            case _:
                yield _Alternative(ast.unparse(choice), lambda value: True)


def _is_same(wanted: Any, value: Any) -> bool:
    return type(value) is type(wanted) and bool(value == wanted)


def _is_plain(name: str, value: Any) -> bool:
    return isinstance(value, _PLAIN[name]) and (name == "bool" or not isinstance(value, bool))


def _is_list(value: Any, inner: ast.expr, alias: Alias) -> bool:
    members = [each for each in inner.elts if not _is_ellipsis(each)] if isinstance(inner, ast.Tuple) else [inner]
    kinds = [kind for member in members for kind in _alternatives(member, alias)]
    return isinstance(value, list) and all(any(kind.allows(each) for kind in kinds) for each in value)


def _is_ellipsis(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...
