"""`mrl demo`: will train a small model; until the trainer exists it says so and fails."""

from __future__ import annotations

import argparse

import mrl
from mrl.errors import SetupError

EXAMPLE = "mrl demo"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`mrl demo` takes no arguments."""


def run(arguments: argparse.Namespace) -> int:
    """Say that there is nothing to run yet."""
    raise SetupError(
        f"the trainer is not part of mrl {mrl.__version__} yet, so there is no demo to run",
        fix="`mrl env` shows what works on this machine; README.md lists what stands today",
    )
