"""The resolved configuration, the difference of two configurations, and the schema, as text without secrets."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from mrl.config.keys import ENTRY, describe_type, fields_of
from mrl.config.resolved.load import Resolved
from mrl.config.schema import Config
from mrl.config.values import KeyPath, dotted, leaves_of

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./@+-]*")
_NOT_TEXT = {"true", "false", "yes", "no", "on", "off", "null"}
_WIDEST = 64  # origins are aligned in one column, at most this far to the right


@dataclass(frozen=True)
class Leaf:
    """One value as it may be shown, with its origin."""

    path: KeyPath
    text: str
    origin: str
    value: Any = field(repr=False)
    """The real value, for comparison: two different secrets are shown alike."""


def leaves(resolved: Resolved[Any]) -> Iterator[Leaf]:
    hide = resolved.secrets.hide
    for path, value in leaves_of(dataclasses.asdict(resolved.config)):
        origin = " ".join(hide(resolved.origin(path)).split())
        yield Leaf(tuple(map(hide, path)), _flow(resolved.secrets.shown(path, value)), origin, value)


def render(resolved: Resolved[Any]) -> str:
    """Return YAML that loads as the same configuration, with the origin of each value in a comment."""
    lines: list[tuple[str, str]] = []
    sections: KeyPath = ()
    for leaf in leaves(resolved):
        *parents, name = leaf.path
        for depth, parent in enumerate(parents):
            if tuple(parents[: depth + 1]) != sections[: depth + 1]:
                lines.append((f"{'  ' * depth}{_scalar(parent)}:", ""))
        sections = tuple(parents)
        lines.append((f"{'  ' * len(parents)}{_scalar(name)}: {leaf.text}", leaf.origin))
    column = min(_WIDEST, max(len(text) for text, _ in lines))
    return "".join(f"{text:<{column}}  # {origin}\n" if origin else f"{text}\n" for text, origin in lines)


def render_difference(before: Resolved[Any], after: Resolved[Any]) -> str:
    """Return the values that differ, one line for each side, or an empty string if none do."""
    old, new = ({leaf.path: leaf for leaf in leaves(resolved)} for resolved in (before, after))
    lines = [f"- {before.path}", f"+ {after.path}"]
    for path in [*old, *(path for path in new if path not in old)]:
        sides = [(sign, side[path]) for sign, side in (("-", old), ("+", new)) if path in side]
        # Types count: 1, 1.0 and true are equal in Python.
        if len(sides) == 1 or repr(sides[0][1].value) != repr(sides[1][1].value):
            lines += [f"{sign} {dotted(path)}: {leaf.text}  # {leaf.origin}" for sign, leaf in sides]
    return "\n".join(lines) + "\n" if len(lines) > 2 else ""


def render_schema() -> str:
    """Return every key with its type, default and meaning. Keys shared by two sections are listed once."""
    return "".join(f"{line}\n" for line in _schema_lines(Config, (), {}))


def _schema_lines(section: type, path: KeyPath, listed: dict[type, KeyPath]) -> Iterator[str]:
    indent = "  " * len(path)
    for name, key in fields_of(section).items():
        default = "required" if key.required else f"default {_flow(key.default)}"
        doc = f"{indent}    {' '.join(key.doc.split())}"
        inner, inner_path = key.section, (*path, name)
        if inner is None:
            yield f"{indent}{name}: {describe_type(key.annotation)}; {default}"
            yield doc
            if key.entries is None:
                continue
            inner, inner_path = key.entries, (*path, name, ENTRY)
            yield f"{indent}  {ENTRY}:"
        else:
            yield f"{indent}{name}:"
            yield doc + (" Default null." if key.default is None and not key.required else "")
        first = listed.setdefault(inner, inner_path)
        if first == inner_path:
            yield from _schema_lines(inner, first, listed)
        else:
            yield f"{'  ' * len(inner_path)}  Same keys as {dotted(first)}."


def _flow(value: Any) -> str:
    """Return a value as YAML on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_scalar(str(name))}: {_flow(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_flow(item) for item in value) + "]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        if _PLAIN.fullmatch(value) and value.lower() not in _NOT_TEXT:
            return value
        # Text that looks like an interpolation must not become one: double its backslashes and put one more before it.
        literal = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
        return json.dumps(literal, ensure_ascii=not literal.isprintable())
    if isinstance(value, float) and not math.isfinite(value):
        return {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}[str(value)]
    return json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
