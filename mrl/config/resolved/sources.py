"""The layers of a configuration, lowest first: the chain of `extends:`, the file, the command line.

The structure of a YAML text is checked, with line numbers, before its values are constructed.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mrl import files
from mrl.config.values import COMMAND_LINE, MAX_LEVELS, ConfigLayer, KeyPath, dotted, merge
from mrl.errors import ConfigError, Problem
from mrl.redaction import is_secret_key

_MAX_FILES = 50
_EXTENDS = "extends"
_MAX_FILE_BYTES = 1 << 20
_OVERRIDE_KEY = re.compile(r"[^\s.=+~]+(\.[^\s.=+~]+)*")
_STANDARD = "tag:yaml.org,2002:"
_KNOWN_TAGS = {_STANDARD + name for name in ("str", "int", "float", "bool", "null", "seq", "map")}
_MAX_VALUES = 10_000  # a configuration has dozens of values; nested aliases can produce any number
_TOO_DEEP = f"more than {MAX_LEVELS} levels deep"


class _Loader(yaml.SafeLoader):
    """YAML's plain values, except that 1e-6 is a number and a date is a text, as OmegaConf reads them.

    Not the loader written in C, which crashes the process on deep nesting.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012  # as PyYAML requires
        first: [(tag, pattern) for tag, pattern in resolvers if tag != _STANDARD + "timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_WITH_EXPONENT = re.compile(r"[-+]?(\d+(_\d+)*(\.[\d_]*)?|\.\d+(_\d+)*)[eE][-+]?\d+$")
_Loader.add_implicit_resolver(_STANDARD + "float", _WITH_EXPONENT, list("-+.0123456789"))


def read_yaml(text: str, where: Callable[[int], str], path: KeyPath = ()) -> tuple[Any, dict[KeyPath, str]]:
    """Return the value of a YAML text, and the origin of each key in it. `where` maps a line to its origin; `path` is
    the key that holds the text."""
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
    except yaml.YAMLError as error:
        raise ConfigError([_syntax_problem(error, text, where, path)]) from error
    except RecursionError as error:
        raise ConfigError([Problem(where(1), dotted(path), f"not readable: {_TOO_DEEP}")]) from error
    if root is None:
        return None, {path: where(1)}
    structure = _Structure(where)
    structure.walk(root, path)
    if structure.problems:
        raise ConfigError(list(dict.fromkeys(structure.problems)))
    try:
        return loader.construct_document(root), structure.origins
    except (yaml.YAMLError, ValueError, KeyError) as error:
        # The error may quote a value, and its key is not known here, so the value might be a secret.
        what = "not readable: a value that its tag does not allow, or a number of thousands of digits"
        raise ConfigError([Problem(where(1), dotted(path), what)]) from error


def _syntax_problem(error: yaml.YAMLError, text: str, where: Callable[[int], str], path: KeyPath) -> Problem:
    line, what = 1, str(error).splitlines()[0]
    if isinstance(error, yaml.MarkedYAMLError):
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        # Leave out names of anchors and tags: a secret that begins with * or ! would be parsed as one.
        what = re.sub(r" '[^<'][^']{3,}'", "", error.problem or "")
    fix = "inside [] and {}, put ${...} in quotes" if "${" in text else ""
    return Problem(where(line), dotted(path), f"not valid YAML: {what}", fix)


class _Structure:
    """Walks a composed YAML text. Collects the origin of every key, and everything that is not allowed."""

    def __init__(self, where: Callable[[int], str]) -> None:
        self.problems: list[Problem] = []
        self.origins: dict[KeyPath, str] = {}
        self._where = where
        self._num_values = 0

    def walk(self, node: yaml.Node, path: KeyPath, above: tuple[yaml.Node, ...] = ()) -> None:
        """Check a node and its children. `above` are the nodes that contain it."""
        self._num_values += 1
        if self._num_values > _MAX_VALUES:
            if self._num_values == _MAX_VALUES + 1:
                self._report(node, path, f"more than {_MAX_VALUES} values, including those repeated by aliases")
        elif node in above:
            self._report(node, path, "an alias that contains itself")
        elif len(above) > MAX_LEVELS:
            self._report(node, path[:2], _TOO_DEEP)
        elif node.tag not in _KNOWN_TAGS:
            tag = node.tag.replace(_STANDARD, "!!")
            self._report(node, path, f"the tag {tag} is not allowed", "write plain values")
        elif isinstance(node, yaml.MappingNode):
            self._mapping(node, path, (*above, node))
        elif isinstance(node, yaml.SequenceNode):
            for item in node.value:
                self.walk(item, path, (*above, node))
        elif isinstance(node, yaml.ScalarNode):
            self._scalar(node, path)

    def _mapping(self, node: yaml.MappingNode, path: KeyPath, above: tuple[yaml.Node, ...]) -> None:
        seen: dict[str, int] = {}
        for key, value in node.value:
            if key.tag == _STANDARD + "merge":
                self._report(
                    key, path, "merge keys (<<) are not supported", "share values with `extends:` and another file"
                )
            elif not isinstance(key, yaml.ScalarNode) or key.tag != _STANDARD + "str":
                self._report(key, path, "a key must be text", "put numbers and booleans in quotes")
            elif key.value in seen:
                self._report(key, (*path, key.value), f"the key occurs twice, first in line {seen[key.value]}")
            else:
                seen[key.value] = key.start_mark.line + 1
                self.origins[*path, key.value] = self._where(key.start_mark.line + 1)
                self.walk(value, (*path, key.value), above)

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> None:
        if "${" in node.value:
            if not _is_interpolation(node.value):
                self._report(node, path, "not a valid interpolation", "write ${key.path} or ${oc.env:NAME}")
        elif node.tag in (_STANDARD + "int", _STANDARD + "float"):
            if re.fullmatch(r"[-+]?0[0-7_]+", node.value):
                self._report(node, path, "this is an octal number", "leave out the leading zero")
            elif ":" in node.value:
                self._report(node, path, "this is a number in base 60", "write it in quotes")

    def _report(self, node: yaml.Node, path: KeyPath, what: str, fix: str = "") -> None:
        if any(map(is_secret_key, path)):
            what = "cannot be read"
        self.problems.append(Problem(self._where(node.start_mark.line + 1), dotted(path), what, fix))


def _is_interpolation(text: str) -> bool:
    try:
        OmegaConf.create({"value": text})
    except OmegaConfBaseException:
        return False
    return True


def read_chain(path: str, children: tuple[str, ...] = ()) -> ConfigLayer:
    """Return the file merged over the file that it extends, which is merged over the file that it extends, and so
    on."""
    layer = _read_file(path, children)
    parent = layer.values.pop(_EXTENDS, None)
    if parent is None:
        return layer
    origin = layer.origins[_EXTENDS,]
    if not isinstance(parent, str) or "\0" in parent:
        raise ConfigError(
            [
                Problem(
                    origin,
                    _EXTENDS,
                    "must be the name of one file",
                    "to combine several files, let each extend the next",
                )
            ]
        )
    parent_path = os.path.normpath(os.path.join(os.path.dirname(path), parent))
    chain = (*children, path)
    if any(os.path.realpath(parent_path) == os.path.realpath(file) for file in chain):
        raise ConfigError(
            [Problem(origin, _EXTENDS, f"the chain of files is a cycle: {' -> '.join((*chain, parent_path))}")]
        )
    if len(chain) == _MAX_FILES:
        what = f"the chain of files is longer than {_MAX_FILES}"
        raise ConfigError([Problem(origin, _EXTENDS, what, "merge some of the files")])
    _require_file(parent_path, where=origin, key=_EXTENDS)
    return merge(read_chain(parent_path, chain), layer)


def read_overrides(overrides: Iterable[str]) -> tuple[ConfigLayer, list[Problem]]:
    """Return `key.path=value` arguments as a layer, and a problem for each argument that cannot be read."""
    layer, problems = ConfigLayer(), []
    for override in overrides:
        key, equals, text = override.partition("=")
        path = tuple(key.split("."))
        if not equals or not _OVERRIDE_KEY.fullmatch(key) or len(path) > MAX_LEVELS:
            problems.append(_malformed_override(key, has_value=bool(equals)))
            continue
        if path[0] == _EXTENDS:
            problems.append(Problem(COMMAND_LINE, key, "only a file can extend another", "name the parent in the file"))
            continue
        try:
            value, origins = read_yaml(text, lambda line: COMMAND_LINE, path)
        except ConfigError as error:
            problems.extend(error.problems)
            continue
        layer = merge(layer, _nested(path, value, origins))
    return layer, problems


def _malformed_override(key: str, *, has_value: bool) -> Problem:
    plain = key.lstrip("+~")
    if has_value and plain != key and _OVERRIDE_KEY.fullmatch(plain):
        return Problem(COMMAND_LINE, key, "an override takes no prefix", f"write {plain}=value; {plain}=null removes")
    return Problem(COMMAND_LINE, "", f'"{key}" is not an override', "write key.path=value")


def _nested(path: KeyPath, value: Any, origins: dict[KeyPath, str]) -> ConfigLayer:
    for name in reversed(path):
        value = {name: value}
    return ConfigLayer(value, origins | {path: COMMAND_LINE})


def _read_file(path: str, children: tuple[str, ...]) -> ConfigLayer:
    if not children:
        _require_file(path, where=path, key="")
    try:
        content = files.read_bytes(path, _MAX_FILE_BYTES)
    except OSError as error:
        raise ConfigError([Problem(path, "", f"cannot be read: {error.strerror}")]) from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError([Problem(f"{path}:{line}", "", "not UTF-8 text", "save the file as UTF-8")]) from error
    values, origins = read_yaml(text, lambda line: f"{path}:{line}")
    if values is None:
        raise ConfigError([Problem(path, "", "the file is empty")])
    if not isinstance(values, dict):
        raise ConfigError([Problem(f"{path}:1", "", "the file must hold keys and values", "write `key: value` lines")])
    return ConfigLayer(values, origins)


def _require_file(path: str, *, where: str, key: str) -> None:
    if os.path.isfile(path):
        return
    subject = f'"{path}" ' if key else ""
    if os.path.isdir(path):
        inside = os.path.join(path, "config.yaml")
        fix = f'did you mean "{inside}"?' if os.path.isfile(inside) else "name a file"
        raise ConfigError([Problem(where, key, f"{subject}is a directory", fix)])
    folder, name = os.path.split(path)
    existing = [file.name for file in Path(folder).glob("*.y*ml")] if os.path.isdir(folder or ".") else []
    similar = difflib.get_close_matches(name, sorted(existing), n=1)
    fix = f'did you mean "{os.path.join(folder, similar[0])}"?' if similar else ""
    raise ConfigError([Problem(where, key, f"{subject}does not exist", fix)])
