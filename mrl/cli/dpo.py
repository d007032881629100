"""`mrl dpo CONFIG`: a policy from responses of which one was preferred to the other, without a reward model."""

from __future__ import annotations

import argparse

from mrl.cli.sft import add_arguments as add_arguments
from mrl.cli.sft import run_verb

EXAMPLE = "mrl dpo configs/laptop-dpo.yaml model.path=my-model"


def run(arguments: argparse.Namespace) -> int:
    """Train, as `mrl sft` does."""
    return run_verb("dpo", arguments)
