"""`mrl algorithms`: print the advantages, losses and estimators that a configuration can name, and your own."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator

from mrl.config.catalog import Algorithm, algorithms, own_algorithm
from mrl.config.own_code import read_function
from mrl.config.proofs import find_proof
from mrl.errors import NameUnknown, did_you_mean

EXAMPLE = "mrl algorithms clip_cov"
_WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", nargs="?", help="one algorithm, or your own as package.module:attribute; without it, all"
    )


def run(arguments: argparse.Namespace) -> int:
    chosen = algorithms() if arguments.name is None else _named(arguments.name)
    for line in _lines(chosen):
        print(line)
    return 0


def _named(name: str) -> tuple[Algorithm, ...]:
    """Return the algorithms with this name. Several kinds may share it."""
    if ":" in name:
        if (function := read_function(name)) is None:
            what = f"{name} is not a function that `def` defines at the top level of a module on this machine"
            raise NameUnknown(what, fix="check the name, or add the module's directory to PYTHONPATH")
        return (own_algorithm(function),)
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
        if (proof := find_proof(algorithm)) is not None:
            yield from (f"      {line}" for line in proof.lines())
