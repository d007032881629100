"""One YAML text as a layer: structure checked first, with line numbers, then read through OmegaConf.

OmegaConf reads the values because it knows 1e-6 for a number, which plain YAML loaders do not.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mrl.config.keys import KeyPath, dotted
from mrl.errors import Problem
from mrl.redaction import is_secret_key

_STANDARD = "tag:yaml.org,2002:"
_KNOWN_TAGS = {_STANDARD + name for name in ("str", "int", "float", "bool", "null", "seq", "map", "timestamp")}
_MAX_LEVELS = 20
_MAX_VALUES = 10_000  # a configuration has some dozens; aliases of aliases reach any number
_TOO_DEEP = f"more than {_MAX_LEVELS} levels deep"


class SourceError(Exception):
    """A YAML text that cannot be read; carries every problem found in it."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__(f"{len(problems)} problems")
        self.problems = problems


def read_yaml(text: str, where: Callable[[int], str], path: KeyPath = ()) -> tuple[Any, dict[KeyPath, str]]:
    """The value of a YAML text and the origin of each key in it; `where` names a line, `path` the place of the text."""
    try:
        # The C loader, which OmegaConf uses, crashes the process on deep nesting: this one looks first.
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise SourceError([_syntax_problem(error, text, where, path)]) from error
    except RecursionError as error:
        raise SourceError([Problem(where(1), dotted(path), f"not readable: {_TOO_DEEP}")]) from error
    if root is None:
        return None, {path: where(1)}
    structure = _Structure(where)
    structure.walk(root, path)
    if structure.problems:
        raise SourceError(list(dict.fromkeys(structure.problems)))
    try:
        return _load(text, is_section=isinstance(root, yaml.MappingNode)), structure.origins
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        # What the error says may quote a value, and the key that it stands under is not known here.
        what = "not readable: a value that its tag does not allow, or a number of thousands of digits"
        raise SourceError([Problem(where(1), dotted(path), what)]) from error


def _syntax_problem(error: yaml.YAMLError, text: str, where: Callable[[int], str], path: KeyPath) -> Problem:
    line, what = 1, str(error).splitlines()[0]
    if isinstance(error, yaml.MarkedYAMLError):
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        # Names of anchors and tags are left out: a secret that begins with * or ! reads as one.
        what = re.sub(r" '[^<'][^']{3,}'", "", error.problem or "")
    fix = "inside [] and {}, ${...} needs quotes around it" if "${" in text else ""
    return Problem(where(line), dotted(path), f"not valid YAML: {what}", fix)


def _load(text: str, *, is_section: bool) -> Any:
    if is_section:
        return OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    return OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)["value"]  # type: ignore[index,call-overload]


class _Structure:
    """Walks a composed YAML text: collects the origin of every key, and what must not stand there."""

    def __init__(self, where: Callable[[int], str]) -> None:
        self.problems: list[Problem] = []
        self.origins: dict[KeyPath, str] = {}
        self._where = where
        self._num_values = 0

    def walk(self, node: yaml.Node, path: KeyPath, above: tuple[yaml.Node, ...] = ()) -> None:
        """Look at a node and what it holds; `above` are the nodes that hold it."""
        self._num_values += 1
        if self._num_values > _MAX_VALUES:
            if self._num_values == _MAX_VALUES + 1:
                self._report(node, path, f"aliases make more than {_MAX_VALUES} values of it")
        elif node in above:
            self._report(node, path, "an alias that holds itself")
        elif len(above) > _MAX_LEVELS:
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
                self._report(key, path, "merge keys (<<) are not supported", "share values by extends: another file")
            elif not isinstance(key, yaml.ScalarNode) or key.tag != _STANDARD + "str":
                self._report(key, path, "a key must be text", "a number or truth value needs quotes to be one")
            elif key.value in seen:
                self._report(key, (*path, key.value), f"stands here twice, first in line {seen[key.value]}")
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
                self._report(node, path, "written like this it is an octal number", "leave out the leading zero")
            elif ":" in node.value:
                self._report(node, path, "written like this it is a number to the base 60", "write it in quotes")

    def _report(self, node: yaml.Node, path: KeyPath, what: str, fix: str = "") -> None:
        if any(map(is_secret_key, path)):
            what = "cannot be read as it is written"
        self.problems.append(Problem(self._where(node.start_mark.line + 1), dotted(path), what, fix))


def _is_interpolation(text: str) -> bool:
    try:
        OmegaConf.create({"value": text})
    except OmegaConfBaseException:
        return False
    return True
