"""One thing of a library that mrl relies on, and how its source is asked for it: by syntax tree, never by import."""

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
    """What a function of mrl, `file.py:name` without `mrl/`, relies on in a file of a library.

    name        this is there
    signature   it can be called like this: leading parameters by place, those after `*` by name
    field       a class has this annotated field, of this type
    default     a field, a parameter or a name of the module has this value
    member      an enum has this member, of this value
    outline     a function's body is this, with `...` for what stands under an `if`
    statement   a function has this statement somewhere
    """

    branch: str
    kind: Kind
    file: str
    name: str
    relied: str = ""

    @property
    def library(self) -> str:
        """The library, and after `@` its version where that is not the pinned one."""
        return self.file.partition("/")[0]

    @property
    def member(self) -> str:
        """The file in the library's wheel."""
        return self.file.replace(self.library, self.library.partition("@")[0], 1)

    def look_up(self, source: str) -> Fact:
        """Return what the library's source says of this thing, in a form that can be stored; None where it has none."""
        found = resolve(ast.parse(source), self.name.split("."))
        return None if found is None else _fact(self.kind, found)

    def complaint(self, fact: Fact) -> str:
        """Return why a library with this fact is not as relied on; empty where it is."""
        if fact is None:
            return f"{self.file} has no {self.name}"
        return next((f"{self.file}: {self.name} {why}" for why in _complaints(self.kind, self.relied, fact)), "")

    @property
    def question(self) -> str:
        """What is looked up, whatever is relied on of it."""
        return f"{self.kind} {self.file} {self.name}"


def read_table(file: Path) -> list[Entry]:
    """Return a table's entries: by file and function of mrl, lines of kind, file, name and what is relied on."""
    kinds = get_args(Kind)
    entries = []
    for path, functions in yaml.safe_load(file.read_text()).items():
        for function, lines in functions.items():
            for line in lines:
                kind, source, name, relied = [*line.split(maxsplit=3), ""][:4]
                assert kind in kinds, f"{kind} is none of {', '.join(kinds)}: {line}"
                entries.append(Entry(f"{path}:{function}", kind, source, name, relied))
    return entries


def _fact(kind: Kind, found: ast.AST) -> Fact:
    """Return the looked-up part alone: parameters, a type, a value, lines, or the digests of all statements.

    What is not of its kind is empty.
    """
    value = found.value if isinstance(found, (ast.AnnAssign, ast.Assign)) else found
    text = ast.unparse(value) if isinstance(value, ast.expr) else "nothing"
    function = resolve(found, ["__init__"]) if isinstance(found, ast.ClassDef) else found
    if kind == "field":
        return ast.unparse(found.annotation) if isinstance(found, ast.AnnAssign) else ""
    if kind == "default":
        return text
    if kind == "member":
        return text if isinstance(found, ast.Assign) else ""
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
        assert isinstance(call, ast.FunctionDef), "it was made of a function"
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
    """Return what a dotted name is: a definition, what is assigned (also to self), a parameter's default."""
    if not names:
        return scope
    if isinstance(scope, Function) and len(names) == 1:
        return _defaults(scope.args).get(names[0])
    bound = [node for node in _statements(scope) if names[0] in _binds(node)]
    bound.sort(key=lambda node: not isinstance(node, (ast.ClassDef, *Function)))  # a stand-in, `name = None`, is last
    return next((inner for node in bound if (inner := resolve(node, names[1:])) is not None), None)


def _statements(scope: ast.AST) -> Iterator[ast.AST]:
    """The statements of a module or class, through `if`, `try` and `with`; of a class also those on self."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With, ast.ExceptHandler)):
            yield from _statements(node)
        elif isinstance(scope, ast.ClassDef) and isinstance(node, Function):
            for each in ast.walk(node):
                if any(name.startswith("self.") for name in _assigned(each)):
                    yield each


def _binds(node: ast.AST) -> list[str]:
    if isinstance(node, (ast.ClassDef, *Function)):
        return [node.name]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name for alias in node.names]
    return [name.removeprefix("self.") for name in _assigned(node)]


def _assigned(node: ast.AST) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    single = [each for target in targets for each in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return [ast.unparse(target) for target in single]


def _defaults(arguments: ast.arguments) -> dict[str, ast.expr]:
    placed = [*arguments.posonlyargs, *arguments.args]
    pairs = [*zip(reversed(placed), reversed(arguments.defaults), strict=False)]
    pairs += [*zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    return {argument.arg: default for argument, default in pairs if default is not None}


def _misfits(has: ast.arguments, relied: str) -> Iterator[str]:
    call = ast.parse(f"lambda {relied}: 0", mode="eval").body
    assert isinstance(call, ast.Lambda), "what stands in the table are parameters"
    placed = [each.arg for each in [*has.posonlyargs, *has.args] if each.arg not in ("self", "cls")]
    known, given = {*placed, *(each.arg for each in has.kwonlyargs)}, [each.arg for each in call.args.args]
    named = {each.arg for each in call.args.kwonlyargs}
    if given != placed[: len(given)]:
        yield f"takes {', '.join(placed)} by place, not {', '.join(given)}"
    if unknown := sorted(named - known):
        yield f"has no parameter {', '.join(unknown)}"
    if wanted := sorted(known - {*given, *named, *_defaults(has)}):
        yield f"wants {', '.join(wanted)} as well"


def outline(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Return a function's statements in lines, without its docstring and without what stands under an `if`."""
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
