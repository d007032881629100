"""Arguments and output shared by the verbs: CONFIG with its overrides, and aligned rows."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mrl.config.resolved.load import Resolved, load_any_config
from mrl.errors import ConfigError, Problem


def add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="+", metavar="CONFIG | key=value", help="a configuration file, and overrides")


def add_config_first(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """Declare the same arguments for a verb whose first argument is the file, or is optional."""
    parser.add_argument("config", metavar="CONFIG", nargs="?" if optional else None, help="a YAML file")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="values that override those of the file")


def split_arguments(arguments: list[str], max_files: int = 1) -> tuple[list[str], list[str]]:
    """Return files and overrides. An argument with `=` is an override."""
    files = [argument for argument in arguments if "=" not in argument]
    if not 1 <= len(files) <= max_files:
        expected = "a configuration file" if max_files == 1 else "one configuration file, or two to compare"
        actual = f"{len(files)} given: {', '.join(files)}" if files else "none given"
        fix = "for example: mrl show configs/laptop-ppo.yaml actor.parallel.tp=1"
        raise ConfigError([Problem("command line", "", f"name {expected}; {actual}", fix)])
    return files, [argument for argument in arguments if "=" in argument]


def load_one(arguments: list[str]) -> Resolved[Any]:
    """Return the configuration of one file and its overrides, of any kind."""
    (path,), overrides = split_arguments(arguments)
    return load_any_config(path, overrides)


def warn_unchecked(resolved: Resolved[Any]) -> None:
    for warning in resolved.warnings:
        print(f"{resolved.path}: not checked: {warning}", file=sys.stderr)


def aligned(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield one indented line for each row, with its cells in columns."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
