"""The user's own functions, read from their sources without importing them: documentation and options.

An option is a keyword-only parameter with a type and a default: `def spo(tokens, config, *, width: Share = 0.2)`.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from mrl.config import bounds
from mrl.config.bounds import is_path

_PLAIN = {"bool": bool, "float": float, "int": int, "str": str}
_BOUNDED = ("Amount", "Count", "NotNegative", "Proportion", "Seconds", "Share", "Text")
_BOUNDS = {"at_least": bounds.at_least, "more_than": bounds.more_than}


@dataclass(frozen=True)
class OwnOption:
    """An option of a function."""

    name: str
    annotation: Any
    """Type of its values, as of a key of the schema. None: the source has no type that a configuration can have."""
    required: bool
    default: str
    """The default as it is written. Empty if the option is required."""


@dataclass(frozen=True)
class OwnFunction:
    """A function at `package.module:attribute`."""

    path: str
    doc: str
    """First line of its documentation."""
    options: Mapping[str, OwnOption]
    takes_any: bool
    """Whether it also takes options that it does not name (`**options`)."""

    def values(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the value of each option: the given one, or the default as it is written."""
        return {name: option.default for name, option in self.options.items()} | dict(given)


def read_function(path: str) -> OwnFunction | None:
    """Return the function, or None if this machine has no source in which `def` defines it."""
    module, _, attribute = path.partition(":")
    file = module_file(module) if is_path(path) else None
    if file is None or file.suffix != ".py":
        return None
    try:
        statements = ast.parse(file.read_text(encoding="utf-8")).body
    except (SyntaxError, ValueError):
        return None  # check_components reports it
    for node in statements:
        if isinstance(node, ast.FunctionDef) and node.name == attribute:
            doc = (ast.get_docstring(node) or "").partition("\n")[0]
            return OwnFunction(path, doc, _options(node.args), node.args.kwarg is not None)
    return None


def _options(arguments: ast.arguments) -> dict[str, OwnOption]:
    options = {}
    for parameter, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        written = "" if default is None else ast.unparse(default)
        options[parameter.arg] = OwnOption(parameter.arg, _type_of(parameter.annotation), default is None, written)
    return options


def _type_of(node: ast.expr | None) -> Any:
    """Return the type that an annotation names, or None if it is not a type of a configuration."""
    match node:
        case ast.BinOp(left=left, op=ast.BitOr(), right=ast.Constant(value=None)):
            return None if (kind := _type_of(left)) is None else kind | None
        case ast.Subscript(value=outer, slice=ast.Tuple(elts=[kind_node, ast.Call(func=called, args=[number])])):
            kind, bound = _type_of(kind_node), _BOUNDS.get(_last_name(called))
            if _last_name(outer) != "Annotated" or bound is None or kind not in (int, float):
                return None
            is_number = isinstance(number, ast.Constant) and isinstance(number.value, int | float)
            return Annotated[kind, bound(ast.literal_eval(number))] if is_number else None
        case ast.Name() | ast.Attribute():
            name = _last_name(node)
            return getattr(bounds, name) if name in _BOUNDED else _PLAIN.get(name)
    return None


def _last_name(node: ast.expr) -> str:
    return ast.unparse(node).rpartition(".")[2]


def module_file(module: str) -> Path | None:
    """Return the file of a module. Search below the package by hand: find_spec would import the parent packages."""
    top, *below = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # a module without a spec, such as __main__
        return None
    if spec is None:
        return None
    if not below and spec.origin is not None:
        return Path(spec.origin)
    for folder in spec.submodule_search_locations or ():
        path = Path(folder, *below)
        candidates = [path.with_suffix(".py"), path / "__init__.py", *path.parent.glob(f"{path.name}.*.so")]
        if file := next((candidate for candidate in candidates if candidate.is_file()), None):
            return file
    return None
