"""Components named in a configuration: built in by a word, the user's own as `package.module:attribute`.

Nothing is imported to check them, so a login node without torch also rejects a wrong name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import Annotated, get_args, get_origin

from mrl.config.bounds import Component, is_path
from mrl.config.keys import typed_leaves
from mrl.config.own_code import module_file
from mrl.config.rules.problems import problem
from mrl.config.sft import AnyConfig
from mrl.config.values import dotted
from mrl.errors import Problem, did_you_mean


def check_components(config: AnyConfig) -> Iterator[Problem]:
    """Yield every unknown name, except modules that are not on this machine."""
    for key, component, name in _named(config):
        if component.kind and name not in component.known and ":" not in name:
            suggestion = did_you_mean(name, component.known)
            fix = f"{suggestion}{'' if suggestion.endswith('?') else '.'} Or name your own as package.module:attribute"
            yield problem(key, f'unknown {component.kind} "{name}"', fix)
    for key, name in own_parts(config):
        if (wrong := _wrong_part(name)) is not None:
            yield problem(key, wrong)


def missing_modules(config: AnyConfig) -> Iterator[Problem]:
    """Yield the user's own components whose modules are not on this machine."""
    for key, name in own_parts(config):
        module = name.partition(":")[0]
        if is_path(name) and module_file(module) is None:
            yield problem(key, f'there is no module "{module}" on this machine', "install it, or add it to PYTHONPATH")


def own_parts(config: AnyConfig) -> Iterator[tuple[str, str]]:
    """Yield each key that names one of the user's own components, with the name."""
    yield from ((key, name) for key, component, name in _named(config) if component.is_own(name))


def _named(config: AnyConfig) -> Iterator[tuple[str, Component, str]]:
    """Yield each key that names a component, with its component type and the name."""
    for path, annotation, value in typed_leaves(type(config), config):
        if get_origin(annotation) is Annotated and isinstance(bound := get_args(annotation)[1], Component):
            yield dotted(path), bound, value


def _wrong_part(name: str) -> str | None:
    """Return why a module on this machine does not define this component. Return None if it does, or if it is not
    here."""
    module, _, attribute = name.partition(":")
    if not is_path(name):
        return f'"{name}" is not of the form package.module:attribute'
    file = module_file(module)
    if file is None or file.suffix != ".py":
        return None
    try:
        names = set(_top_names(ast.parse(file.read_text(encoding="utf-8")).body))
    except (SyntaxError, ValueError) as error:
        return f"{file} cannot be read as Python: {error}"
    first = attribute.partition(".")[0]
    if first in names or "*" in names or "__getattr__" in names:
        return None
    suggestion = did_you_mean(first, [known for known in names if not known.startswith("_")])
    return f'{file} has no "{first}"' + (f"; {suggestion}" if suggestion else "")


def _top_names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the names that a module's statements define, including those in branches."""
    for node in nodes:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.Import() | ast.ImportFrom():
                yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case _:
                yield from _top_names(ast.iter_child_nodes(node))
