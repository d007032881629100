"""`mrl show`: print a resolved configuration, how a run ended, the difference of two configurations, or the schema."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mrl.cli.arguments import split_arguments, warn_unchecked
from mrl.config.resolved.load import Resolved, load_any_config
from mrl.config.resolved.render import render, render_difference, render_schema
from mrl.errors import ConfigError, Problem
from mrl.files import read_text
from mrl.redaction import redact_text

EXAMPLE = "mrl show configs/laptop-ppo.yaml actor.parallel.tp=1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config",
        nargs="*",
        metavar="CONFIG | RUN | key=value",
        help="a file or the directory of a run, or two to compare, and overrides",
    )
    parser.add_argument("--schema", action="store_true", help="print every key: type, default, meaning")


def run(arguments: argparse.Namespace) -> int:
    """Print the requested text. With two files, the overrides apply to the second."""
    if arguments.schema:
        if arguments.config:
            raise ConfigError([Problem("command line", "", "--schema takes no configuration", "mrl show --schema")])
        print(render_schema(), end="")
        return 0
    paths, overrides = split_arguments(arguments.config, max_files=2)
    if len(paths) == 1:
        if _is_run(paths[0]):
            print("".join(f"# {line}\n" for line in _ending(Path(paths[0])).splitlines()), end="")
        # The configuration of a run is already resolved, and its model may no longer exist.
        as_written = _is_run(paths[0]) and not overrides
        print(read_text(Path(paths[0], "config.yaml")) if as_written else render(_load(paths[0], overrides)), end="")
    else:
        print(render_difference(_load(paths[0], []), _load(paths[1], overrides)) or "no difference\n", end="")
    return 0


def _is_run(path: str) -> bool:
    return Path(path, "config.yaml").is_file()


def _ending(directory: Path) -> str:
    from mrl.observe.ending import describe_ending

    return f"run {directory}: {redact_text(describe_ending(directory))}"


def _load(path: str, overrides: list[str]) -> Resolved[Any]:
    resolved = load_any_config(str(Path(path, "config.yaml")) if _is_run(path) else path, overrides)
    warn_unchecked(resolved)
    return resolved
