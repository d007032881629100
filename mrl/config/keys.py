"""The schema as a list of keys: what `mrl show --schema` prints, and where suggestions for a wrong key come from."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from mrl.config import schema

KeyPath = tuple[str, ...]
ENTRY = "NAME"  # stands for the names that users choose


@dataclass(frozen=True)
class Key:
    """One key of the schema: a section or a value."""

    path: KeyPath
    annotation: Any
    required: bool
    default: Any
    doc: str

    @property
    def section(self) -> type | None:
        """The dataclass of a section's keys; None for a value."""
        return section_of(self.annotation)

    @property
    def entries(self) -> type | None:
        """The dataclass of the entries of a section whose names are the user's; None for anything else."""
        is_dict = get_origin(self.annotation) is dict
        return section_of(get_args(self.annotation)[1]) if is_dict else None


def dotted(path: KeyPath) -> str:
    """The key as users write it."""
    return ".".join(path)


def section_of(annotation: Any) -> type | None:
    """The dataclass that an annotation names, itself or beside None."""
    choices = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    return next((choice for choice in choices if dataclasses.is_dataclass(choice) and isinstance(choice, type)), None)


@cache
def fields_of(section: type) -> Mapping[str, Key]:
    """The keys that stand directly in a section, with paths relative to it."""
    hints = get_type_hints(section, include_extras=True)
    docs = _field_docs(section)
    keys = {}
    for entry in dataclasses.fields(section):
        required = entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING
        default = None if required else entry.default
        if entry.default_factory is not dataclasses.MISSING:
            default = entry.default_factory()
        inner = section_of(hints[entry.name])
        doc = docs.get(entry.name) or (inspect.getdoc(inner) if inner else None) or ""
        keys[entry.name] = Key((entry.name,), hints[entry.name], required, default, doc)
    return keys


def schema_keys(section: type = schema.Config, prefix: KeyPath = ()) -> Iterator[Key]:
    """Every key of the schema, each section before what stands in it."""
    for name, key in fields_of(section).items():
        yield dataclasses.replace(key, path=(*prefix, name))
        if key.section is not None:
            yield from schema_keys(key.section, (*prefix, name))
        elif key.entries is not None:
            yield from schema_keys(key.entries, (*prefix, name, ENTRY))


def nearest_key(section: type, path: KeyPath) -> str | None:
    """The key that the writer of the unknown key `path` in `section` may have meant: here, or else anywhere."""
    *parents, name = path
    if near := difflib.get_close_matches(name, fields_of(section), n=1):
        return dotted((*parents, near[0]))
    names = {key.path[-1] for key in schema_keys()}
    inside = dotted((*parents, ""))
    for meant in difflib.get_close_matches(name, names, n=1, cutoff=0.8):  # far away, only what is very near
        places = [dotted(_with_names_of(path, key.path)) for key in schema_keys() if key.path[-1] == meant]
        return next((place for place in places if place.startswith(inside)), places[0])
    return None


def _with_names_of(path: KeyPath, place: KeyPath) -> KeyPath:
    """`place` with the names that the writer of `path` chose, as far as both go the same way."""
    return tuple(
        path[depth] if name == ENTRY and place[:depth] == path[:depth] and depth < len(path) else name
        for depth, name in enumerate(place)
    )


def describe_type(annotation: Any) -> str:
    """The type of a key in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return f"{describe_type(arguments[0])}, {arguments[1]}" if arguments[0] is not str else str(arguments[1])
    if origin is Literal:
        return " | ".join(str(choice) for choice in arguments)
    if origin in (Union, types.UnionType):
        return " | ".join(describe_type(choice) for choice in arguments)
    if origin is dict:
        return "free keys" if arguments[1] is Any else f"name: {describe_type(arguments[1])}"
    if section_of(annotation) is not None:
        return "section"
    return {int: "whole number", float: "number", bool: "true | false", str: "text", type(None): "null"}[annotation]


def _field_docs(section: type) -> dict[str, str]:
    """Field -> the docstring under it; Python keeps none of these at run time, so the source is read."""
    docs: dict[str, str] = {}
    for declared in filter(dataclasses.is_dataclass, reversed(section.__mro__)):
        (statement,) = ast.parse(inspect.getsource(declared)).body
        assert isinstance(statement, ast.ClassDef), f"{declared} is not written as a class"
        docs |= dict(_docs_of(statement))
    return docs


def _docs_of(statement: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for entry, after in zip(statement.body, statement.body[1:], strict=False):
        match entry, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(doc))):
                yield name, doc
