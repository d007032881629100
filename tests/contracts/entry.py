"""A part of a library that mrl relies on, and how to find it in the source: by syntax tree, never by import."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import yaml

Kind = Literal["name", "signature", "field", "default", "member", "outline", "statement"]
Fact = str | list[str] | None
_LETTERS = 12
Function = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Entry:
    """A fact about a library's file on which a function of mrl (`file.py:name` without `mrl/`) relies.

    name        the name exists
    signature   the function accepts these parameters: leading ones by position, the ones after `*` by name
    field       the class has this annotated field, with this type
    default     the field, parameter or module variable has this value
    member      the enum has this member, with this value
    outline     the function has this body, with `...` for the body of each `if`
    statement   the function has this statement somewhere
    """

    branch: str
    kind: Kind
    file: str
    name: str
    relied: str = ""

    @property
    def library(self) -> str:
        """Name of the library, followed by `@` and its version if that is not the pinned one."""
        return self.file.partition("/")[0]

    @property
    def member(self) -> str:
        """Path of the file in the library's wheel."""
        return self.file.replace(self.library, self.library.partition("@")[0], 1)

    def look_up(self, source: str) -> Fact:
        """Return the fact from the library's source in storable form, or None if the name does not exist."""
        node = resolve(ast.parse(source), self.name.split("."))
        return None if node is None else _fact(self.kind, node)

    def complaint(self, fact: Fact) -> str:
        """Return how this fact differs from the expected one, or an empty string if it does not."""
        if fact is None:
            return f"{self.file} has no {self.name}"
        return next((f"{self.file}: {self.name} {why}" for why in _complaints(self.kind, self.relied, fact)), "")

    @property
    def question(self) -> str:
        """Key of the lookup, without the expected value."""
        return f"{self.kind} {self.file} {self.name}"


def read_table(file: Path) -> list[Entry]:
    """Return the entries of a table. Per file and function of mrl it has lines of kind, file, name, expected value."""
    kinds = get_args(Kind)
    entries = []
    for path, functions in yaml.safe_load(file.read_text()).items():
        for function, lines in functions.items():
            for line in lines:
                kind, source, name, relied = [*line.split(maxsplit=3), ""][:4]
                assert kind in kinds, f"unknown kind {kind}, not one of {', '.join(kinds)}: {line}"
                entries.append(Entry(f"{path}:{function}", kind, source, name, relied))
    return entries


def _fact(kind: Kind, target: ast.AST) -> Fact:
    """Return only the part that is compared: parameters, a type, a value, lines, or digests of all statements.

    The result is empty if the node has another kind.
    """
    value = target.value if isinstance(target, (ast.AnnAssign, ast.Assign)) else target
    text = ast.unparse(value) if isinstance(value, ast.expr) else "nothing"
    function = resolve(target, ["__init__"]) if isinstance(target, ast.ClassDef) else target
    if kind == "field":
        return ast.unparse(target.annotation) if isinstance(target, ast.AnnAssign) else ""
    if kind == "default":
        return text
    if kind == "member":
        return text if isinstance(target, ast.Assign) else ""
    if kind == "name":
        return "there"
    if not isinstance(function, Function):
        return ""
    if kind == "signature":
        return f"({ast.unparse(function.args)})"
    if kind == "outline":
        return "\n".join(outline(function))
    return sorted({_digest(node) for node in ast.walk(function) if isinstance(node, ast.stmt)})


def _digest(statement: ast.stmt) -> str:
    return hashlib.sha256(ast.unparse(statement).encode()).hexdigest()[:_LETTERS]


def _complaints(kind: Kind, relied: str, fact: str | list[str]) -> Iterator[str]:
    if kind in ("signature", "outline", "statement") and not fact:
        yield "is no function"
    elif kind == "signature":
        call = ast.parse(f"def f{fact}: 0").body[0]
        assert isinstance(call, ast.FunctionDef), "the fact is a function's parameters"
        yield from _misfits(call.args, relied)
    elif kind == "field" and not fact:
        yield "is no annotated field"
    elif kind == "field" and fact != relied:
        yield f"is of type {fact}, not {relied}"
    elif kind == "default" and fact != relied:
        yield f"is {fact}, not {relied}"
    elif kind == "member" and fact != relied:
        yield f"is {fact or 'nothing'}, not a member of value {relied}"
    elif kind == "outline" and fact != relied.rstrip("\n"):
        yield f"has changed: {str(fact).replace(chr(10), ' | ')}"
    elif kind == "statement" and _digest(ast.parse(relied).body[0]) not in fact:
        yield f"has no statement `{relied}`"


def resolve(scope: ast.AST, names: Sequence[str]) -> ast.AST | None:
    """Return the node of a dotted name: a definition, an assignment (also to self), or a parameter's default."""
    if not names:
        return scope
    if isinstance(scope, Function) and len(names) == 1:
        return _defaults(scope.args).get(names[0])
    bound = [node for node in _statements(scope) if names[0] in _binds(node)]
    # definitions first: a placeholder, `name = None`, comes last
    bound.sort(key=lambda node: not isinstance(node, (ast.ClassDef, *Function)))
    return next((inner for node in bound if (inner := resolve(node, names[1:])) is not None), None)


def _statements(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield statements of a module or class, also inside `if`, `try`, `with`, and a class's assignments to self."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With, ast.ExceptHandler)):
            yield from _statements(node)
        elif isinstance(scope, ast.ClassDef) and isinstance(node, Function):
            for inner in ast.walk(node):
                if any(name.startswith("self.") for name in _assigned(inner)):
                    yield inner


def _binds(node: ast.AST) -> list[str]:
    if isinstance(node, (ast.ClassDef, *Function)):
        return [node.name]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name for alias in node.names]
    return [name.removeprefix("self.") for name in _assigned(node)]


def _assigned(node: ast.AST) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    single = [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return [ast.unparse(target) for target in single]


def _defaults(arguments: ast.arguments) -> dict[str, ast.expr]:
    placed = [*arguments.posonlyargs, *arguments.args]
    pairs = [*zip(reversed(placed), reversed(arguments.defaults), strict=False)]
    pairs += [*zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    return {argument.arg: default for argument, default in pairs if default is not None}


def _misfits(actual: ast.arguments, relied: str) -> Iterator[str]:
    call = ast.parse(f"lambda {relied}: 0", mode="eval").body
    assert isinstance(call, ast.Lambda), "the expected value is a list of parameters"
    placed = [argument.arg for argument in [*actual.posonlyargs, *actual.args] if argument.arg not in ("self", "cls")]
    known = {*placed, *(argument.arg for argument in actual.kwonlyargs)}
    positional = [argument.arg for argument in call.args.args]
    named = {argument.arg for argument in call.args.kwonlyargs}
    if positional != placed[: len(positional)]:
        yield f"takes {', '.join(placed)} by position, not {', '.join(positional)}"
    if unknown := sorted(named - known):
        yield f"has no parameter {', '.join(unknown)}"
    if required := sorted(known - {*positional, *named, *_defaults(actual)}):
        yield f"also requires {', '.join(required)}"


def outline(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Return a function's statements in lines, without its docstring and without the body of each `if`."""
    lines: list[str] = []
    for node in function.body[ast.get_docstring(function) is not None :]:
        word = "if"
        while isinstance(node, ast.If):
            lines.append(f"{word} {ast.unparse(node.test)}: ...")
            if len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If):
                word, node = "elif", node.orelse[0]
                continue
            lines += ["else: ..."] * bool(node.orelse)
            break
        else:
            lines += ast.unparse(node).splitlines()
    return lines
