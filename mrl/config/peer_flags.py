"""Flags of a command that starts slime or OpenRLHF, from a script or from the command itself. Nothing is executed.

A script is read as in `verl_script`. Arrays of words, and their use in a command, are read, too. A file that the script
sources is not read; its name is reported as a key.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from mrl.config.values import KeyPath
from mrl.config.verl_script import ASSIGNMENT, expanded, from_environment, value_of, words_of
from mrl.errors import ConfigError, Problem

_ARRAY = re.compile(r"\s*([A-Za-z_]\w*)\+?=\((.*)")
_USE = re.compile(r"\$\{([A-Za-z_]\w*)\[[@*]\]\}")
_SOURCE = re.compile(r"\s*(?:source|\.)\s+(\S+)")
_ENDS = ("|", "&&", ";", ">", ">>", "2>&1", "&")


def read_flags(text: str, name: str, program: re.Pattern[str]) -> dict[KeyPath, Any]:
    """Return the flags after the word that names the program, with underscores for dashes."""
    leaves: dict[KeyPath, Any] = {}
    variables: dict[str, str] = {}
    for words in _commands(text, variables):
        starts = [number for number, word in enumerate(words) if program.search(word)]
        if words[:1] == ["source"]:
            leaves["source", *words[1:]] = True
        elif starts:
            leaves["program",] = words[starts[-1]]
            leaves |= _flags(words[starts[-1] + 1 :])
    if ("program",) not in leaves:
        fix = "give a script or a command that starts it, with its flags"
        raise ConfigError([Problem(name, "", f"has no command with {program.pattern}", fix)])
    return {path: from_environment(value) for path, value in leaves.items()}


def _commands(text: str, variables: dict[str, str]) -> Iterator[list[str]]:
    """Yield the words of each line, with variables and arrays in place of their names."""
    arrays: dict[str, list[str]] = {}
    filling: str | None = None
    for raw in text.replace("\\\n", " ").splitlines():
        line = expanded(raw, variables)
        if filling is None and (array := _ARRAY.match(line)):
            filling, line = array[1], array[2]
            arrays[filling] = []
        if filling is not None:
            inside, closed, _ = line.partition(")") if line.strip().startswith(")") else (line, "", "")
            if line.rstrip().endswith(")") and line.count("(") < line.count(")"):
                inside, closed = line.rstrip()[:-1], ")"
            arrays[filling] += words_of(inside)
            filling = None if closed else filling
        elif source := _SOURCE.match(line):
            yield ["source", source[1].strip("\"'").rpartition("/")[2]]
        elif assigned := ASSIGNMENT.fullmatch(line):
            variables[assigned[1]] = "".join(words_of(assigned[2])[:1])
        else:
            words = words_of(line)
            uses = [(word, _USE.fullmatch(word.strip("\"'"))) for word in words]
            yield [each for word, use in uses for each in (arrays.get(use[1], [word]) if use else [word])]


def _flags(words: list[str]) -> Mapping[KeyPath, Any]:
    """Return flags with their values: true without one, a list of several."""
    found: dict[KeyPath, Any] = {}
    path: KeyPath | None = None
    for word in words:
        if word in _ENDS:
            break
        if word.startswith("--"):
            flag, equals, value = word[2:].partition("=")
            path = tuple(flag.replace("-", "_").split("."))
            found[path] = value_of(value) if equals else True
        elif path is not None:
            before, value = found[path], value_of(word)
            found[path] = value if before is True else [*(before if isinstance(before, list) else [before]), value]
    return found
