"""`mrl algorithms`: print the advantages, losses and estimators that a configuration can name."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator

from mrl.config.catalog import Algorithm, algorithms
from mrl.errors import NameUnknown, did_you_mean

EXAMPLE = "mrl algorithms clip_cov"
_WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="one algorithm; without it, all")


def run(arguments: argparse.Namespace) -> int:
    chosen = algorithms() if arguments.name is None else _named(arguments.name)
    for line in _lines(chosen):
        print(line)
    return 0


def _named(name: str) -> tuple[Algorithm, ...]:
    """Return the algorithms with this name. Several kinds may share it."""
    chosen = tuple(algorithm for algorithm in algorithms() if name in algorithm.names)
    if not chosen:
        known = [known for algorithm in algorithms() for known in algorithm.names]
        raise NameUnknown(f'no algorithm is called "{name}"', fix=did_you_mean(name, known) or "run `mrl algorithms`")
    return chosen


def _lines(chosen: tuple[Algorithm, ...]) -> Iterator[str]:
    kind = ""
    for algorithm in chosen:
        if algorithm.kind != kind:
            kind = algorithm.kind
            yield f"{kind} ({algorithm.key})"
        paper = f"  [{algorithm.paper}]" if algorithm.paper else ""
        yield f"  {', '.join(algorithm.names)}{paper}"
        yield from textwrap.wrap(algorithm.formula, _WIDTH, initial_indent="      ", subsequent_indent="      ")
        if algorithm.options:
            yield f"      options: {', '.join(algorithm.options)}"
