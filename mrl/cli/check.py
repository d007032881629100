"""`mrl check CONFIG`: find what would go wrong before a run waits in a queue."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from typing import Any

from mrl.cli.arguments import add_config, load_one
from mrl.config.hardware import DEFAULT, HARDWARE
from mrl.config.resolved.load import Resolved
from mrl.preflight.findings import CheckResult, check_offline, check_own_parts, guarded, skip

EXAMPLE = "mrl check configs/laptop-ppo.yaml --offline"
EXIT_FAILED = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--hardware", help=f"{', '.join(HARDWARE)} (default: cluster.hardware, or {DEFAULT})")
    depth = parser.add_mutually_exclusive_group()
    depth.add_argument(
        "--offline", action="store_true", help="check only the configuration: no data, no cluster, no torch"
    )
    depth.add_argument(
        "--all-rows", action="store_true", help="check every row of the data, not a sample of each source"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print one line for each check. Return 2 if any check fails."""
    resolved = load_one(arguments.config)
    counts: Counter[str] = Counter()
    for finding in findings(resolved, arguments):
        counts[finding.verdict] += 1
        fix = f"\n      fix: {finding.fix}" if finding.fix else ""
        line = f"{finding.verdict:<4}  {finding.about}: {finding.what}{fix}"
        print(resolved.secrets.hide(line), flush=True)
    print("\n" + ", ".join(f"{counts[verdict]} {verdict}" for verdict in ("ok", "warn", "fail", "skip")))
    return EXIT_FAILED if counts["fail"] else 0


def findings(resolved: Resolved[Any], arguments: argparse.Namespace) -> Iterator[CheckResult]:
    config = resolved.config
    yield from check_offline(resolved, arguments.hardware)
    if arguments.offline:
        yield skip("data, machines", "--offline checks only the configuration")
        return
    # These load torch, Ray and everything else that a run needs.
    from mrl.preflight.data import check_data, check_models
    from mrl.preflight.machine import check_disk, check_machines, check_slurm

    yield from check_own_parts(config)
    yield from check_models(config)
    yield from guarded("data", check_data(config, all_rows=arguments.all_rows))
    yield from guarded("disk", check_disk(config))
    yield from guarded("machines", check_machines(config))
    yield from check_slurm(config)
