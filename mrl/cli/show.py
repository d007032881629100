"""`mrl show`: the resolved configuration, the difference of two, or the schema."""

from __future__ import annotations

import argparse
import sys

from mrl.config.load import Resolved, load_config
from mrl.config.render import render, render_difference, render_schema
from mrl.config.schema import Config
from mrl.errors import ConfigError, Problem

EXAMPLE = "mrl show configs/laptop-ppo.yaml actor.parallel.tp=1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `mrl show`."""
    parser.add_argument(
        "config", nargs="*", metavar="CONFIG | key=value", help="one file, or two to compare, and overrides"
    )
    parser.add_argument("--schema", action="store_true", help="print every key: type, default, meaning")


def run(arguments: argparse.Namespace) -> int:
    """Print what was asked for. With two files, the overrides apply to the second."""
    if arguments.schema:
        if arguments.config:
            raise ConfigError([Problem("command line", "", "--schema takes no configuration", "mrl show --schema")])
        print(render_schema(), end="")
        return 0
    paths, overrides = split_arguments(arguments.config, most_files=2)
    if len(paths) == 1:
        print(render(load(paths[0], overrides)), end="")
    else:
        print(render_difference(load(paths[0], []), load(paths[1], overrides)) or "no difference\n", end="")
    return 0


def split_arguments(arguments: list[str], most_files: int) -> tuple[list[str], list[str]]:
    """Files and overrides: an argument with `=` is an override."""
    files = [argument for argument in arguments if "=" not in argument]
    if not 1 <= len(files) <= most_files:
        wanted = "a configuration file" if most_files == 1 else "one configuration file, or two to compare"
        given = f"{len(files)} given: {', '.join(files)}" if files else "none given"
        raise ConfigError([Problem("command line", "", f"name {wanted}; {given}", f"for example: {EXAMPLE}")])
    return files, [argument for argument in arguments if "=" in argument]


def load(path: str, overrides: list[str]) -> Resolved[Config]:
    """The configuration; what could not be checked is said on stderr."""
    resolved = load_config(path, overrides)
    for warning in resolved.warnings:
        print(f"{path}: not checked: {warning}", file=sys.stderr)
    return resolved
