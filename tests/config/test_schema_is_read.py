"""Every key of the schema is read by code: a key that is never read would have no effect.

Reads are found by a small type inference over the sources of mrl: parameters, attributes and local names
whose type is a configuration dataclass, followed through attribute chains, calls, loops and dictionaries.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import mrl
from mrl.config import schema
from mrl.config.keys import schema_keys

SCHEMA = "config/schema.py"
parsed = functools.cache(ast.parse)
Read = tuple[str, str]


@functools.cache
def inside(node: ast.AST) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(node))


@dataclass(frozen=True)
class Type:
    """A class of mrl by name, or with `of_dict` a dictionary of its instances."""

    name: str
    of_dict: bool = False


@dataclass
class Known:
    """Declarations of all sources: attributes and methods of classes, and return types of functions."""

    attributes: dict[str, dict[str, Type]] = field(default_factory=dict)
    bases: dict[str, list[str]] = field(default_factory=dict)
    returns: dict[str, Type] = field(default_factory=dict)
    type_variables: dict[str, str] = field(default_factory=dict)
    """These names and names of unions, each with the first class of the union."""

    def lineage(self, name: str) -> list[str]:
        """Return a class of mrl, then the classes that it inherits from."""
        return [name, *(above for base in self.bases[name] if base in self.bases for above in self.lineage(base))]

    def type_of(self, annotation: ast.expr | None) -> Type | None:
        """Return the type of an annotation if it is a class of mrl or a dictionary of one."""
        match annotation:
            case ast.Constant(value=str(text)):
                return self.type_of(ast.parse(text, mode="eval").body)
            case ast.Name(id=name) if self.type_variables.get(name, name) in self.attributes:
                return Type(self.type_variables.get(name, name))
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                one, other = self.type_of(left), self.type_of(right)
                return self._either(one, other) if one and other else one or other
            case ast.Subscript(value=ast.Name(id="dict" | "Mapping"), slice=ast.Tuple(elts=[_, value])):
                inner = self.type_of(value)
                return Type(inner.name, of_dict=True) if inner else None
        return None

    def _either(self, one: Type, other: Type) -> Type:
        """A class in the place of a union: what is read of it is read of both."""
        name = f"{one.name} | {other.name}"
        self.attributes.setdefault(name, {})
        self.bases[name] = [one.name, other.name]
        return Type(name)


@dataclass
class Scope:
    """Names of one function with their types, and the reads in it."""

    known: Known
    names: dict[str, Type]
    reads: set[Read]

    def infer(self, expression: ast.expr) -> Type | None:
        """Return the type of an expression. Each attribute of a known class on the way is a read."""
        match expression:
            case ast.Name(id=name):
                return self.names.get(name)
            case ast.Attribute(value=value, attr=attribute):
                base = self.infer(value)
                if base is None or base.of_dict:
                    return None
                lineage = self.known.lineage(base.name)
                self.reads |= {(name, attribute) for name in lineage}
                return next(filter(None, (self.known.attributes[name].get(attribute) for name in lineage)), None)
            case ast.Subscript(value=value) | ast.Call(func=ast.Attribute(value=value, attr="get")):
                base = self.infer(value)
                return Type(base.name) if base is not None and base.of_dict else None
            case ast.Call(func=ast.Name(id=name)):
                return Type(name) if name in self.known.attributes else self.known.returns.get(name)
            case ast.Call(func=ast.Attribute(value=value, attr=method)):
                base = self.infer(value)
                return self.known.returns.get(f"{base.name}.{method}") if base is not None else None
            case ast.IfExp(body=body, orelse=orelse):
                return self.infer(body) or self.infer(orelse)
        return None

    def bind(self, target: ast.expr, value: ast.expr) -> None:
        """Record the type that an assignment gives to a name."""
        match target, value:
            case ast.Tuple(elts=targets), ast.Tuple(elts=values) if len(targets) == len(values):
                for inner_target, inner_value in zip(targets, values, strict=True):
                    self.bind(inner_target, inner_value)
            case ast.Name(id=name), _:
                if type_ := self.infer(value):
                    self.names[name] = type_

    def bind_loop(self, target: ast.expr, iterated: ast.expr) -> None:
        """Record the type of the values that a loop iterates over."""
        match target, iterated:
            case ast.Tuple(elts=[_, ast.Name(id=name)]), ast.Call(func=ast.Attribute(value=value, attr="items")):
                pass
            case ast.Name(id=name), ast.Call(func=ast.Attribute(value=value, attr="values")):
                pass
            case _:
                return
        type_ = self.infer(value)
        if type_ is not None and type_.of_dict:
            self.names[name] = Type(type_.name)


def declare(trees: list[ast.Module]) -> Known:
    """Return classes with annotated attributes, return types, and attributes set in __init__."""
    classes = [node for tree in trees for node in inside(tree) if isinstance(node, ast.ClassDef)]
    known = Known({definition.name: {} for definition in classes})
    for definition in classes:
        known.bases[definition.name] = [base.id for base in definition.bases if isinstance(base, ast.Name)]
    for tree in trees:
        for node in tree.body:
            match node:
                case ast.Assign(
                    targets=[ast.Name(id=name)],
                    value=ast.Call(func=ast.Name(id="TypeVar"), args=[_, ast.Name(id=first), *_]),
                ):
                    known.type_variables[name] = first
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.BinOp(left=ast.Name(id=first), op=ast.BitOr())):
                    known.type_variables[name] = first
    for tree in trees:
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and (type_ := known.type_of(node.returns)):
                known.returns[node.name] = type_
    for definition in classes:
        attributes = known.attributes[definition.name]
        for node in definition.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                if type_ := known.type_of(node.annotation):
                    attributes[node.target.id] = type_
            elif isinstance(node, ast.FunctionDef) and (type_ := known.type_of(node.returns)):
                known.returns[f"{definition.name}.{node.name}"] = type_
    for definition in classes:
        for node in definition.body:
            if isinstance(node, ast.FunctionDef):
                known.attributes[definition.name] |= self_attributes(node, scope_of(node, definition, known, set()))
    return known


def self_attributes(function: ast.FunctionDef, scope: Scope) -> dict[str, Type]:
    """Return the types of `self.name = ...` in a method."""
    attributes = {}
    for node in inside(function):
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                pairs = [*zip(targets, values, strict=False)]
            case ast.Assign(targets=[target], value=value):
                pairs = [(target, value)]
            case _:
                pairs = []
        for target, value in pairs:
            match target:
                case ast.Attribute(value=ast.Name(id="self"), attr=name):
                    if kind := scope.infer(value):
                        attributes[name] = kind
    return attributes


def scope_of(
    function: ast.FunctionDef, owner: ast.ClassDef | None, known: Known, reads: set[Read], outer: Scope | None = None
) -> Scope:
    """Return the scope of a function with all names typed by parameters, assignments and loops."""
    scope = Scope(known, dict(outer.names) if outer else {}, reads)
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    for argument in arguments:
        if type_ := known.type_of(argument.annotation):
            scope.names[argument.arg] = type_
    if owner is not None and arguments:
        scope.names.setdefault(arguments[0].arg, Type(owner.name))
    for _ in range(2):  # a name may be used above the line that gives it its type (loops, nested functions)
        for node in inside(function):
            match node:
                case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation):
                    if type_ := known.type_of(annotation):
                        scope.names[name] = type_
                case ast.Assign(targets=[target], value=value) | ast.NamedExpr(target=target, value=value):
                    scope.bind(target, value)
                case ast.For(target=target, iter=iterated) | ast.comprehension(target=target, iter=iterated):
                    scope.bind_loop(target, iterated)
    return scope


def functions(
    node: ast.AST, owner: ast.ClassDef | None = None
) -> Iterator[tuple[ast.FunctionDef, ast.ClassDef | None]]:
    """Yield every function with its class; nested functions come with the outer function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            yield child, owner
        elif isinstance(child, ast.ClassDef):
            yield from functions(child, child)


def reads_in(sources: dict[str, str]) -> set[Read]:
    """Return (class, attribute) pairs that the sources read. Declarations in the schema do not count."""
    trees = [parsed(text) for text in sources.values()]
    known = declare(trees)
    reads: set[Read] = set()
    for tree in trees:
        for function, owner in functions(tree):
            collect(function, owner, known, reads, None)
    return reads


def collect(
    function: ast.FunctionDef, owner: ast.ClassDef | None, known: Known, reads: set[Read], outer: Scope | None
) -> None:
    scope = scope_of(function, owner, known, reads, outer)
    for node in inside(function):
        if isinstance(node, ast.FunctionDef) and node is not function:
            collect(node, None, known, reads, scope)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            scope.infer(node)


def sources_of_mrl() -> dict[str, str]:
    root = Path(mrl.__file__).parent
    return {str(file.relative_to(root)): file.read_text() for file in sorted(root.rglob("*.py"))}


def keys_of_the_schema() -> set[Read]:
    sections = {schema.Config, *(key.section or key.entries for key in schema_keys())} - {None}
    declaring = {base for section in sections for base in section.__mro__}
    return {(base.__name__, name) for base in declaring for name in inspect.get_annotations(base)}


@functools.cache
def reads_of_mrl() -> set[Read]:
    return reads_in(sources_of_mrl())


def test_every_key_is_read() -> None:
    unread = keys_of_the_schema() - reads_of_mrl()
    assert not unread, f"nothing reads {sorted(unread)}"


def test_a_dead_key_is_found() -> None:
    sources = sources_of_mrl()
    added = sources[SCHEMA].replace("    nodes: Count = 1\n", "    nodes: Count = 1\n    dead: Count = 1\n")
    assert added != sources[SCHEMA]
    assert ("ClusterConfig", "dead") not in reads_in(sources | {SCHEMA: added})


def test_a_key_is_dead_once_its_readers_are_gone() -> None:
    sources = sources_of_mrl()
    readers = [name for name, text in sources.items() if "epochs_per_step" in text and name != SCHEMA]
    assert ("BatchConfig", "epochs_per_step") in reads_of_mrl()
    left = {name: text for name, text in sources.items() if name not in readers}
    assert ("BatchConfig", "epochs_per_step") not in reads_in(left)


def test_a_name_alike_in_another_class_is_no_read() -> None:
    other = (
        "class Other:\n    nodes: int = 1\n\n"
        "def use(other: Other) -> int:\n    return other.nodes\n\n"
        "def use_untyped(config):\n    return config.nodes\n"
    )
    assert ("ClusterConfig", "nodes") not in reads_in({SCHEMA: sources_of_mrl()[SCHEMA], "other.py": other})


def test_reads_are_followed() -> None:
    reader = """
class Holder:
    def __init__(self, config: Config) -> None:
        self._deadlines = config.deadlines

    def wait(self) -> float:
        return self._deadlines.call_s

def sizes(config: Config | None):
    models = config.trained_roles()
    for name, model in models.items():
        yield model.parallel.tp
    yield [role.max_tokens_per_device for role in models.values()]
    yield models["actor"].ddp
    cluster, batch = config.cluster, config.batch
    def inner():
        return cluster.nodes
    (lambda: batch.epochs_per_step)()
"""
    reads = reads_in({SCHEMA: sources_of_mrl()[SCHEMA], "reader.py": reader})
    assert {
        ("DeadlinesConfig", "call_s"),
        ("ParallelConfig", "tp"),
        ("TrainedModelConfig", "max_tokens_per_device"),
        ("TrainedModelConfig", "ddp"),
        ("ClusterConfig", "nodes"),
        ("BatchConfig", "epochs_per_step"),
    } <= reads
    assert ("ParallelConfig", "pp") not in reads
