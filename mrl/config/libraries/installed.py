"""The classes that receive passed-on keys. Names, types and choices of their fields come from the installed sources.

The sources are read, not imported: importing either library would load torch.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from mrl.config.bounds import Bound
from mrl.config.libraries import megatron_fields, transformer_fields, vllm_fields
from mrl.config.libraries.megatron_fields import FieldRules


@dataclass(frozen=True)
class Target:
    """The class that receives a section, and the keys of it that mrl sets itself."""

    package: str
    files: tuple[str, ...]
    class_name: str
    owned: Mapping[str, str]
    """Key -> the setting or component that determines it, in words that follow "set by"."""
    rules: FieldRules
    """The other keys that are accepted."""
    read_here: Mapping[str, str] = field(default_factory=dict)
    """Keys that mrl reads itself, with their types. These are also checked if the library is not installed."""
    aliases: str = ""
    """Folder of the library's package that defines its type aliases."""


TRANSFORMER = Target(
    package="megatron",
    files=("core/model_parallel_config.py", "core/transformer/transformer_config.py"),
    class_name="TransformerConfig",
    owned=transformer_fields.OWNED,
    rules=transformer_fields.TRANSFORMER,
    read_here={"recompute_granularity": "str | None", "recompute_modules": "list[str] | None"},
)
DDP = Target(
    package="megatron",
    files=("core/distributed/distributed_data_parallel_config.py",),
    class_name="DistributedDataParallelConfig",
    owned={},
    rules=megatron_fields.DDP,
    read_here={"bucket_size": "int | None"},
)
OPTIMIZER = Target(
    package="megatron",
    files=("core/optimizer/optimizer_config.py",),
    class_name="OptimizerConfig",
    owned={
        "min_lr": "{role}.schedule.min_lr_ratio, a share of lr",
        **dict.fromkeys(("params_dtype", "bf16"), "{role}.dtype"),
    },
    rules=megatron_fields.OPTIMIZER,
)
ENGINE = Target(
    package="vllm",
    files=("engine/arg_utils.py",),
    class_name="AsyncEngineArgs",
    owned=vllm_fields.OWNED,
    rules=vllm_fields.ENGINE,
    read_here={
        "dtype": "Literal['bfloat16', 'float16', 'float32']",
        "gpu_memory_utilization": "float",
        **dict.fromkeys(("kv_cache_memory_bytes", "max_num_batched_tokens", "max_num_seqs"), "int | None"),
    },
    aliases="config",
)
SERVER = replace(ENGINE, owned=vllm_fields.OWNED_BY_JUDGE, rules=vllm_fields.JUDGE)


def wrong_kind(target: Target, known: Mapping[str, str] | None, name: str, value: Any) -> str:
    """Return the expected kind of value, or an empty string if the value is right."""
    annotations = [types[name] for types in (target.read_here, known or {}) if name in types]
    alias = partial(_alias, target.package, target.aliases)
    return next(filter(None, (wrong_value(annotation, value, alias) for annotation in annotations)), "")


@cache
def _alias(package: str, folder: str, name: str) -> str | None:
    """Return the definition of a type alias: the right side of `name = Literal[...]` in any file of that folder."""
    directory = _installed_file(package, f"{folder}/__init__.py") if folder else None
    for file in sorted(directory.parent.glob("*.py")) if directory is not None else ():
        text = file.read_text(encoding="utf-8")
        if f"\n{name} = Literal[" in text:
            for statement in ast.parse(text).body:
                if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == name:
                    return ast.unparse(statement.value)
    return None


@cache
def _installed_sources(package: str, files: tuple[str, ...]) -> tuple[str, ...] | None:
    paths = [_installed_file(package, file) for file in files]
    existing = [path for path in paths if path is not None]
    return tuple(path.read_text(encoding="utf-8") for path in existing) if len(existing) == len(files) else None


def field_types(target: Target, sources: tuple[str, ...] | None = None) -> Mapping[str, str] | None:
    """Return the fields of a target's class and of its bases, with their types as the library writes them.

    Read the installed library unless `sources` gives the texts of the target's files. Return None if these files do not
    define the class.
    """
    sources = sources or _installed_sources(target.package, target.files)
    return None if sources is None else _field_types(target.class_name, sources)


@cache
def _field_types(class_name: str, sources: tuple[str, ...]) -> Mapping[str, str] | None:
    statements = [statement for text in sources for statement in ast.parse(text).body]
    classes = {statement.name: statement for statement in statements if isinstance(statement, ast.ClassDef)}
    try:
        return dict(_annotated(class_name, classes))
    except KeyError:  # the class or a base has moved: no list is better than an incomplete one
        return None


def _installed_file(package: str, file: str) -> Path | None:
    # Look up only the top-level package: finding a submodule imports its parent packages.
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (path := Path(folder, file)).is_file():
            return path
    return None


def _annotated(class_name: str, classes: Mapping[str, ast.ClassDef]) -> Iterator[tuple[str, str]]:
    definition = classes[class_name]
    for base in definition.bases:
        if isinstance(base, ast.Name):
            yield from _annotated(base.id, classes)
    for statement in definition.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id, ast.unparse(statement.annotation)


# --- does a value match an annotation, judged by the text of the annotation ------------------------------------------

Alias = Callable[[str], str | None]
"""Maps a name of the library to the annotation that it stands for, or to None if unknown."""
_PLAIN: dict[str, tuple[type, ...]] = {"bool": (bool,), "int": (int,), "float": (int, float), "str": (str,)}
_SEQUENCES = {"list", "List", "tuple", "Tuple", "set", "Set", "Sequence"}
_MAPPINGS = {"dict", "Dict", "Mapping"}
_NULL, _SECTION = Bound("null", lambda value: value is None), Bound("a section", lambda value: isinstance(value, dict))


def wrong_value(annotation: str, value: Any, alias: Alias) -> str:
    """Return the expected kind of value. Return an empty string if the value is right or only the library could
    decide."""
    alternatives = list(_alternatives(ast.parse(annotation, mode="eval").body, alias))
    if any(alternative.allows(value) for alternative in alternatives):
        return ""
    *words, last = dict.fromkeys(alternative.words for alternative in alternatives)
    return f"{', '.join(words)} or {last}" if words else last


def _alternatives(node: ast.expr, alias: Alias) -> Iterator[Bound]:
    match node:
        case ast.Constant(value=None):
            yield _NULL
        case ast.Constant(value=str(quoted)):
            yield from _alternatives(ast.parse(quoted, mode="eval").body, alias)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            yield from _alternatives(left, alias)
            yield from _alternatives(right, alias)
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            yield from _alternatives(inner, alias)
            yield _NULL
        case ast.Subscript(value=ast.Name(id="Union"), slice=ast.Tuple(elts=members)):
            for member in members:
                yield from _alternatives(member, alias)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=choices):
            yield from map(_choice, choices.elts if isinstance(choices, ast.Tuple) else [choices])
        case ast.Subscript(value=ast.Name(id=name), slice=inner) if name in _SEQUENCES:
            yield Bound(f"a list ({ast.unparse(node)})", lambda value: _is_list(value, inner, alias))
        case ast.Name(id=name) | ast.Subscript(value=ast.Name(id=name)) if name in _MAPPINGS:
            yield _SECTION
        case ast.Name(id=name) if name in _PLAIN:
            yield Bound(name, partial(_is_plain, name))
        case ast.Name(id=name) if definition := alias(name):
            yield from _alternatives(ast.parse(definition, mode="eval").body, alias)
        case _:
            yield Bound(ast.unparse(node), lambda value: True)


def _choice(node: ast.expr) -> Bound:
    if isinstance(node, ast.Constant):
        wanted = node.value
        return Bound(str(wanted), lambda value: type(value) is type(wanted) and value == wanted)
    return Bound(ast.unparse(node), lambda value: True)


def _is_plain(name: str, value: Any) -> bool:
    return isinstance(value, _PLAIN[name]) and (name == "bool" or not isinstance(value, bool))


def _is_list(value: Any, inner: ast.expr, alias: Alias) -> bool:
    members = inner.elts if isinstance(inner, ast.Tuple) else [inner]
    members = [member for member in members if not (isinstance(member, ast.Constant) and member.value is ...)]
    kinds = [kind for member in members for kind in _alternatives(member, alias)]
    return isinstance(value, list) and all(any(kind.allows(item) for kind in kinds) for item in value)
