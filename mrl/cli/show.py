"""`mrl show`: the resolved configuration, the difference of two, or the schema."""

from __future__ import annotations

import argparse
from typing import Any

from mrl.cli.arguments import split_arguments, warn_unchecked
from mrl.config.load import Resolved, load_any_config
from mrl.config.render import render, render_difference, render_schema
from mrl.errors import ConfigError, Problem

EXAMPLE = "mrl show configs/laptop-ppo.yaml actor.parallel.tp=1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
    paths, overrides = split_arguments(arguments.config, max_files=2)
    if len(paths) == 1:
        print(render(_load(paths[0], overrides)), end="")
    else:
        print(render_difference(_load(paths[0], []), _load(paths[1], overrides)) or "no difference\n", end="")
    return 0


def _load(path: str, overrides: list[str]) -> Resolved[Any]:
    resolved = load_any_config(path, overrides)
    warn_unchecked(resolved)
    return resolved
