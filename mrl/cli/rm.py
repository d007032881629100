"""`mrl rm CONFIG`: a reward model from responses of which one was preferred to the other."""

from __future__ import annotations

import argparse

from mrl.cli.sft import add_arguments as add_arguments
from mrl.cli.sft import run_verb

EXAMPLE = "mrl rm configs/laptop-rm.yaml model.path=my-model"


def run(arguments: argparse.Namespace) -> int:
    """Train, as `mrl sft` does."""
    return run_verb("rm", arguments)
