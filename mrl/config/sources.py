"""The sources of a configuration, lowest first: the chain of `extends:`, the file, the command line."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mrl.config.keys import KeyPath
from mrl.config.layers import COMMAND_LINE, ConfigLayer, merge
from mrl.config.yaml_source import SourceError, read_yaml
from mrl.errors import Problem

_EXTENDS = "extends"
_MAX_FILE_BYTES = 1 << 20
_MAX_LEVELS = 20
_OVERRIDE_KEY = re.compile(r"[^\s.=+~]+(\.[^\s.=+~]+)*")


def read_chain(path: str, children: tuple[str, ...] = ()) -> ConfigLayer:
    """The file laid over the file that it extends, over the one that that extends, and so on."""
    layer = _read_file(path, children)
    parent = layer.values.pop(_EXTENDS, None)
    if parent is None:
        return layer
    stands_at = layer.origins[_EXTENDS,]
    if not isinstance(parent, str) or "\0" in parent:
        raise SourceError([Problem(stands_at, _EXTENDS, "must name one file", "a chain of files extends one by one")])
    parent_path = os.path.normpath(os.path.join(os.path.dirname(path), parent))
    chain = (*children, path)
    if any(os.path.realpath(parent_path) == os.path.realpath(file) for file in chain):
        raise SourceError([Problem(stands_at, _EXTENDS, f"goes in a circle: {' -> '.join((*chain, parent_path))}")])
    _require_file(parent_path, where=stands_at, key=_EXTENDS)
    return merge(read_chain(parent_path, chain), layer)


def read_overrides(overrides: Iterable[str]) -> tuple[ConfigLayer, list[Problem]]:
    """`key.path=value` arguments as a layer; those that cannot be read are problems, the others still count."""
    layer, problems = ConfigLayer(), []
    for override in overrides:
        key, equals, text = override.partition("=")
        path = tuple(key.split("."))
        if not equals or not _OVERRIDE_KEY.fullmatch(key) or len(path) > _MAX_LEVELS:
            problems.append(_malformed_override(key, has_value=bool(equals)))
            continue
        if path[0] == _EXTENDS:
            problems.append(Problem(COMMAND_LINE, key, "only a file can extend another", "name the parent in the file"))
            continue
        try:
            value, origins = read_yaml(text, lambda line: COMMAND_LINE, path)
        except SourceError as error:
            problems.extend(error.problems)
            continue
        layer = merge(layer, _nested(path, value, origins))
    return layer, problems


def _malformed_override(key: str, *, has_value: bool) -> Problem:
    plain = key.lstrip("+~")
    if has_value and plain != key and _OVERRIDE_KEY.fullmatch(plain):
        return Problem(COMMAND_LINE, key, "an override has no prefix", f"write {plain}=value; {plain}=null removes")
    return Problem(COMMAND_LINE, "", f'"{key}" is not an override', "write key.path=value")


def _nested(path: KeyPath, value: Any, origins: dict[KeyPath, str]) -> ConfigLayer:
    for name in reversed(path):
        value = {name: value}
    return ConfigLayer(value, origins | {path: COMMAND_LINE})


def _read_file(path: str, children: tuple[str, ...]) -> ConfigLayer:
    if not children:
        _require_file(path, where=path, key="")
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise SourceError([Problem(path, "", f"cannot be read: {error.strerror}")]) from error
    if len(content) > _MAX_FILE_BYTES:
        raise SourceError([Problem(path, "", f"{len(content)} bytes are no configuration; at most {_MAX_FILE_BYTES}")])
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise SourceError([Problem(f"{path}:{line}", "", "not UTF-8 text", "save the file as UTF-8")]) from error
    values, origins = read_yaml(text, lambda line: f"{path}:{line}")
    if values is None:
        raise SourceError([Problem(path, "", "the file is empty")])
    if not isinstance(values, dict):
        raise SourceError([Problem(f"{path}:1", "", "the file must hold keys and values", "write `key: value` lines")])
    return ConfigLayer(values, origins)


def _require_file(path: str, *, where: str, key: str) -> None:
    if os.path.isfile(path):
        return
    subject = f'"{path}" ' if key else ""
    if os.path.isdir(path):
        inside = os.path.join(path, "config.yaml")
        fix = f'did you mean "{inside}"?' if os.path.isfile(inside) else "name a file"
        raise SourceError([Problem(where, key, f"{subject}is a directory", fix)])
    folder, name = os.path.split(path)
    files = [file.name for file in Path(folder).glob("*.y*ml")] if os.path.isdir(folder or ".") else []
    near = difflib.get_close_matches(name, sorted(files), n=1)
    fix = f'did you mean "{os.path.join(folder, near[0])}"?' if near else ""
    raise SourceError([Problem(where, key, f"{subject}does not exist", fix)])
