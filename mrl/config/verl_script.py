"""Keys and values in a script that starts verl, or in a YAML file of it. Nothing is executed.

A script is read like a shell would read its simple parts: assignments, `${NAME:-default}`, whole-number arithmetic, and
the words `key=value` of the command. A variable of the environment becomes `${oc.env:NAME}`, which mrl reads when it
loads the configuration. Anything else, such as the output of a command, stays as text with a `$`.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import yaml

from mrl.config.values import KeyPath, leaves_of
from mrl.errors import ConfigError, Problem

ASSIGNMENT = re.compile(r"\s*(?:export\s+|local\s+)?([A-Za-z_]\w*)=(.*)")
_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_][\w@-]*(?:\.[\w@-]+)+)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?::?-([^{}]*))?\}|\$([A-Za-z_]\w*)")
_ARITHMETIC = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")
_OPERATIONS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def read_verl(text: str, name: str) -> dict[KeyPath, Any]:
    """Return verl's keys with their values, from YAML if the file's name says so, otherwise from a script."""
    if name.endswith((".yaml", ".yml")):
        try:
            values = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError([Problem(name, "", f"cannot be read as YAML: {error}")]) from error
        leaves = dict(leaves_of(values)) if isinstance(values, dict) else {}
    else:
        leaves = dict(overrides_of(text))
    if not leaves or () in leaves:
        fix = "give a script with key=value words, or a YAML file"
        raise ConfigError([Problem(name, "", "has no keys of verl", fix)])
    return {path: from_environment(_referenced(value, leaves)) for path, value in leaves.items()}


def overrides_of(text: str) -> Iterator[tuple[KeyPath, Any]]:
    variables: dict[str, str] = {}
    for line in text.replace("\\\n", " ").splitlines():
        text_of_line = expanded(line, variables)
        if (assigned := ASSIGNMENT.fullmatch(text_of_line)) and not _OVERRIDE.search(text_of_line):
            variables[assigned[1]] = "".join(words_of(assigned[2])[:1])
            continue
        for word in words_of(text_of_line):
            if override := _OVERRIDE.fullmatch(word):
                yield tuple(override[1].split(".")), value_of(override[2])


def words_of(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:  # a quote that does not end on this line
        return text.split()


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """Return the text with the values of known variables, and with whole-number arithmetic computed."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        return variables.get(name, match[2] if match[2] is not None else match[0])

    def number(match: re.Match[str]) -> str:
        names = re.sub(r"\b[A-Za-z_]\w*\b", lambda name: variables.get(name[0], name[0]), match[1])
        try:
            return str(_computed(ast.parse(names.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return match[0]

    return _ARITHMETIC.sub(number, _VARIABLE.sub(value, text))


def _computed(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_computed(node.left), _computed(node.right))
    raise ValueError("no whole-number arithmetic")


def value_of(text: str) -> Any:
    """Return a value as Hydra reads it."""
    if _EXPONENT.fullmatch(text):
        return float(text)
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return text if isinstance(value, dict) and "$" in text else value


def from_environment(value: Any) -> Any:
    """Return a value with the variables that the script does not set as mrl's interpolations."""
    if isinstance(value, list):
        return [from_environment(item) for item in value]
    if not isinstance(value, str) or "$(" in value or "." in "".join(_REFERENCE.findall(value)):
        return value
    return _VARIABLE.sub(lambda match: f"${{oc.env:{match[1] or match[3]}}}", value)


def _referenced(value: Any, leaves: Mapping[KeyPath, Any]) -> Any:
    """Return the value of the key that a value refers to, if the file has it."""
    reference = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
    return leaves.get(tuple(reference[1].split(".")), value) if reference else value
