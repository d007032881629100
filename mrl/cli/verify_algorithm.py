"""`mrl verify algorithm CONFIG`: check the configured advantage and policy loss on random batches."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from mrl.cli.arguments import load_one
from mrl.config.schema import Config
from mrl.errors import ConfigError, Problem

if TYPE_CHECKING:
    from mrl.verify.algorithm import Finding

_WRONG = 1


def run(arguments: argparse.Namespace) -> int:
    """Print what holds and what does not. Return 1 if anything is wrong."""
    resolved = load_one(arguments.config)
    config = resolved.config
    if not isinstance(config, Config):
        what = "has no section `algorithm`: only a configuration of `mrl train` has an advantage and a policy loss"
        raise ConfigError([Problem(str(resolved.path), "", what)])
    from mrl.verify.algorithm import find_oracle, verify_advantage, verify_policy_loss  # imports torch

    algorithm = config.algorithm
    findings: list[Finding] = []
    for kind, name, found in (
        ("advantage", algorithm.advantage, verify_advantage(algorithm)),
        ("policy loss", algorithm.loss.policy, verify_policy_loss(algorithm.loss)),
    ):
        print(f"{kind} {name}")
        for finding in found:
            print(f"  WRONG  {finding.name}: {finding.fault}" if finding.fault else f"  ok     {finding.name}")
        if ":" in name and find_oracle(name) is None:
            module, _, function = name.partition(":")
            print(f"  --     not compared with its formula: define {function}_oracle in {module}")
        findings += found
    return _WRONG if any(finding.fault for finding in findings) else 0
