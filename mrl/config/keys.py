"""The keys of the schema, and the strict conversion of plain values to typed ones, which reports every mistake."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import json
import math
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from mrl.config import schema, verl_keys
from mrl.config.values import UNUSABLE, KeyPath, Secrets, dotted, leaves_of
from mrl.errors import Problem, did_you_mean

ENTRY = "NAME"  # stands for a name chosen by the user


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
        """Return the dataclass that defines the keys of a section. Return None for a value."""
        return section_of(self.annotation)

    @property
    def entries(self) -> type | None:
        """Return the dataclass of the entries of a section whose names the user chooses. Return None for anything
        else."""
        is_dict = get_origin(self.annotation) is dict
        return section_of(get_args(self.annotation)[1]) if is_dict else None


def section_of(annotation: Any) -> type | None:
    """Return the dataclass in an annotation, alone or in a union with None."""
    choices = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    return next((choice for choice in choices if dataclasses.is_dataclass(choice) and isinstance(choice, type)), None)


@cache
def fields_of(section: type) -> Mapping[str, Key]:
    """Return the direct keys of a section, with paths relative to it."""
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
    """Yield every key of the schema, each section before its keys."""
    for name, key in fields_of(section).items():
        yield dataclasses.replace(key, path=(*prefix, name))
        if key.section is not None:
            yield from schema_keys(key.section, (*prefix, name))
        elif key.entries is not None:
            yield from schema_keys(key.entries, (*prefix, name, ENTRY))


@cache
def _annotations(root: type) -> Mapping[str, Any]:
    return {dotted(key.path): key.annotation for key in schema_keys(root)}


def nearest_key(section: type, path: KeyPath, root: type) -> str | None:
    """Return the key that the user probably meant by the unknown `path`: a key of `section`, or else any key of
    `root`."""
    *parents, name = path
    if similar := difflib.get_close_matches(name, fields_of(section), n=1):
        return dotted((*parents, similar[0]))
    names = {key.path[-1] for key in schema_keys(root)}
    inside = dotted((*parents, ""))
    # elsewhere, accept only a very similar name
    for candidate in difflib.get_close_matches(name, names, n=1, cutoff=0.8):
        places = [dotted(_with_names_of(path, key.path)) for key in schema_keys(root) if key.path[-1] == candidate]
        return next((place for place in places if place.startswith(inside)), places[0])
    return None


def _with_names_of(path: KeyPath, place: KeyPath) -> KeyPath:
    """Return `place` with the names that the user chose in `path`, as far as both paths agree."""
    return tuple(
        path[depth] if name == ENTRY and place[:depth] == path[:depth] and depth < len(path) else name
        for depth, name in enumerate(place)
    )


def typed_leaves(annotation: Any, value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any, Any]]:
    """Yield each value of a typed configuration that is set, with its path and its type. Skip free keys."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if value is None:
        return
    if origin in (Union, types.UnionType) and section_of(annotation) is None:
        (annotation,) = (choice for choice in arguments if choice is not type(None))
        yield from typed_leaves(annotation, value, path)
    elif (section := section_of(annotation)) is not None:
        for name, key in fields_of(section).items():
            yield from typed_leaves(key.annotation, getattr(value, name), (*path, name))
    elif origin is list:
        for number, item in enumerate(value):
            yield from typed_leaves(arguments[0], item, (*path, str(number)))
    elif origin is dict:
        for name, item in value.items() if arguments[1] is not Any else ():
            yield from typed_leaves(arguments[1], item, (*path, name))
    else:
        yield path, annotation, value


def describe_type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return f"{describe_type(arguments[0])}, {arguments[1]}" if arguments[0] is not str else str(arguments[1])
    if origin is Literal:
        return " | ".join(str(choice) for choice in arguments)
    if origin in (Union, types.UnionType):
        return " | ".join(describe_type(choice) for choice in arguments)
    if origin is list:
        return f"list of {describe_type(arguments[0])}"
    if origin is dict:
        return "free keys" if arguments[1] is Any else f"name: {describe_type(arguments[1])}"
    if section_of(annotation) is not None:
        return "section"
    return {int: "whole number", float: "number", bool: "true | false", str: "text", type(None): "null"}[annotation]


def _field_docs(section: type) -> dict[str, str]:
    """Return the docstring under each field. Python discards them at run time, so read the source."""
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


AnyTyped = TypeVar("AnyTyped")
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_NO_TEXT = re.compile(r"[-+]?[0-9][0-9_.]*([eE][-+]?[0-9]+)?|true|false|yes|no|on|off", re.IGNORECASE)


def convert(
    root: type[AnyTyped], values: Mapping[str, Any], secrets: Secrets, origin: Callable[[KeyPath], str]
) -> tuple[AnyTyped | None, list[Problem]]:
    """Return the configuration typed as `root`, or None and the problems. `origin` returns where a key was set."""
    conversion = _Conversion(root, values, secrets, origin)
    config = conversion.section(root, values, ())
    return (None if config is UNUSABLE else config), conversion.problems


def convert_value(annotation: Any, value: Any, path: KeyPath) -> list[Problem]:
    """Return the problems of one value at a key that is not part of the schema."""
    conversion = _Conversion(type(None), {}, Secrets(), lambda path: "")
    conversion._value(annotation, value, path)
    return conversion.problems


class _Conversion:
    """One pass over the values. Each method returns the typed value, or UNUSABLE after reporting a problem."""

    def __init__(
        self, root: type, values: Mapping[str, Any], secrets: Secrets, origin: Callable[[KeyPath], str]
    ) -> None:
        self.problems: list[Problem] = []
        self._root = root
        self._values = values
        self._secrets = secrets
        self._origin = origin

    def section(self, section: type, values: Any, path: KeyPath) -> Any:
        if not isinstance(values, dict):
            return self._wrong(path, "a section of keys", values)
        known = fields_of(section)
        unknown = {name: nearest_key(section, (*path, name), self._root) for name in values if name not in known}
        for name, suggestion in unknown.items():
            answers = {leaf: self._answer(leaf, value) for leaf, value in leaves_of(values[name], (*path, name))}
            if any(answers.values()):
                for leaf, answer in answers.items():
                    self._report(leaf, "unknown key", answer or "verl's: see docs/coming-from-verl.md")
            else:
                self._report((*path, name), "unknown key", _unknown_key_fix(name, suggestion, (*path, name), known))
        typed = {}
        for name, key in known.items():
            inner = (*path, name)
            if name in values:
                typed[name] = self._value(key.annotation, values[name], inner)
            elif not key.required or dotted(inner) in unknown.values():
                continue  # use the default; or a misspelled key was already reported
            elif key.section is not None:
                typed[name] = self.section(key.section, {}, inner)
            else:
                typed[name] = self._report(inner, "is required and missing", key.doc.split(". ")[0].rstrip("."))
        return UNUSABLE if unknown or any(value is UNUSABLE for value in typed.values()) else section(**typed)

    def _answer(self, path: KeyPath, value: Any) -> str:
        """Return what to write instead of verl's key. Return an empty string if this kind of configuration has no
        equivalent."""
        if (target := verl_keys.name_for(path)) is not None:
            known = _annotations(self._root)
            name = re.split("[,=]", target[0])[0]
            if name not in known and known.get(name.rpartition(".")[0]) != dict[str, Any]:
                return ""
        return verl_keys.answer(path, self._secrets.shown(path, value), self._values)

    def _value(self, annotation: Any, value: Any, path: KeyPath) -> Any:
        if value is UNUSABLE:
            return value
        origin, arguments = get_origin(annotation), get_args(annotation)
        if origin in (Union, types.UnionType):
            (choice,) = (choice for choice in arguments if choice is not type(None))
            return None if value is None else self._value(choice, value, path)
        if value is None:
            fix = "give it a value, or leave it out if it has a default"
            return self._report(path, "must not be null", fix)
        if origin is Annotated:
            typed, bound = self._value(arguments[0], value, path), arguments[1]
            is_right = typed is UNUSABLE or bound.allows(typed)
            return typed if is_right else self._wrong(path, str(bound), value)
        if origin is Literal:
            return self._choice(arguments, value, path)
        if origin is list:
            return self._list(arguments[0], value, path)
        if origin is dict:
            return self._free_keys(arguments, value, path)
        if section_of(annotation) is not None:
            return self.section(annotation, value, path)
        return self._scalar(annotation, value, path)

    def _choice(self, choices: tuple[str, ...], value: Any, path: KeyPath) -> Any:
        if value in choices:
            return value
        suggestion = did_you_mean(str(value), choices)
        what = f"{self._quote(path, value)} is not one of {', '.join(choices)}"
        return self._report(path, what, "" if suggestion.startswith("known:") else suggestion)

    def _free_keys(self, arguments: tuple[Any, Any], values: Any, path: KeyPath) -> Any:
        if not isinstance(values, dict):
            return self._wrong(path, "a section of keys", values)
        name_annotation, annotation = arguments
        if annotation is Any:
            return values
        # A child file removes an entry of its parent by setting it to null.
        entries = {name: value for name, value in values.items() if value is not None}
        names = [self._value(name_annotation, name, (*path, name)) for name in entries]
        typed = {name: self._value(annotation, value, (*path, name)) for name, value in entries.items()}
        return UNUSABLE if UNUSABLE in (*names, *typed.values()) else typed

    def _list(self, annotation: Any, values: Any, path: KeyPath) -> Any:
        if not isinstance(values, list):
            return self._wrong(path, "a list", values, "" if isinstance(values, dict) else f"write [{values}]")
        typed = [self._value(annotation, value, (*path, str(number))) for number, value in enumerate(values)]
        return UNUSABLE if UNUSABLE in typed else typed

    def _scalar(self, kind: type, value: Any, path: KeyPath) -> Any:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if kind is float and is_number:
            try:
                number = float(value)
            except OverflowError:
                number = math.inf
            return number if math.isfinite(number) else self._wrong(path, "a finite number", value)
        if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
            return value
        fix = ""
        if kind is str:
            fix = "" if isinstance(value, dict | list) else "write it in quotes"
        elif kind is int and is_number and value.is_integer():
            fix = f"write {int(value)}"
        elif isinstance(value, str) and _NO_TEXT.fullmatch(value):
            fix = "write it without quotes, or as ${oc.decode:${oc.env:NAME}} if it comes from the environment"
        return self._wrong(path, _KINDS[kind], value, fix)

    def _wrong(self, path: KeyPath, expected: str, value: Any, fix: str = "") -> Any:
        return self._report(path, f"must be {expected}, not {self._quote(path, value)}", fix)

    def _quote(self, path: KeyPath, value: Any) -> str:
        if isinstance(value, (dict, list)):
            return "a section" if isinstance(value, dict) else "a list"
        return json.dumps(self._secrets.shown(path, value), ensure_ascii=False, default=str)

    def _report(self, path: KeyPath, what: str, fix: str = "") -> Any:
        self.problems.append(Problem(self._origin(path), dotted(path), what, fix))
        return UNUSABLE


_SAMPLED = "the sampled distribution would differ from the trained one"
_NOT_SAMPLED = "refused: log-probs would not be those of the policy that the engine samples from"
_REFUSED = {
    **dict.fromkeys(("actor.lora.dropout", "actor.lora.lora_dropout"), _NOT_SAMPLED),
    "actor.lora.use_dora": "refused: only plain low-rank adapters have been compared with peft",
    "actor.lora.modules_to_save": "refused: all weights except the adapters stay frozen",
    "actor.lora.r": 'did you mean "actor.lora.rank"?',
    "actor.lora.use_rslora": 'did you mean "actor.lora.rslora"?',
    "actor.lora.init_lora_weights": 'did you mean "actor.lora.init"?',
    "rollout.repetition_penalty": f"refused: {_SAMPLED}; penalize repetition in the reward",
    "rollout.presence_penalty": f"refused: {_SAMPLED}",
    "rollout.frequency_penalty": f"refused: {_SAMPLED}",
    "rollout.min_tokens": f"refused: {_SAMPLED}; penalize short responses in the reward",
}
"""Keys of other trainers that mrl does not support, with the reason."""


def _unknown_key_fix(name: str, suggestion: str | None, path: KeyPath, known: Iterable[str]) -> str:
    if dotted(path) in _REFUSED:
        return _REFUSED[dotted(path)]
    if "." in name:
        return f"write it as nested sections, or as {dotted(path)}=... on the command line"
    return f'did you mean "{suggestion}"?' if suggestion else f"known: {', '.join(sorted(known))}"
