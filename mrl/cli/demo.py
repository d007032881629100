"""`mrl demo`: train a small model on this machine, to see it work."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from mrl.cli.report import write_report
from mrl.errors import EXIT_STOPPED, SetupError

EXAMPLE = "mrl demo --algorithm grpo --tp 2 --pp 2"
ALGORITHMS = ("ppo", "grpo", "rloo", "reinforce_plus_plus", "remax", "dapo")  # a file each in mrl/demo


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=1, help="of the model and of all that is drawn (default 1)")
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="ppo")
    parser.add_argument("--tp", type=int, default=2, help="tensor parallel size of the actor (default 2)")
    parser.add_argument("--pp", type=int, default=1, help="pipeline parallel size of the actor (default 1)")
    parser.add_argument("--steps", type=int, default=60, help="of reinforcement learning (default 60)")
    parser.add_argument("--dir", help="a new directory for its files (default runs/demo-DATE)")


def run(arguments: argparse.Namespace) -> int:
    """Return 0 if the model learned what it should, EXIT_STOPPED when it was asked to stop before and has saved."""
    directory = Path(arguments.dir or f"runs/demo-{time.strftime('%Y%m%d-%H%M%S')}")
    if directory.exists():
        raise SetupError(f"{directory} exists already", fix="choose another --dir")
    from mrl.demo.demo import GOAL, MAX_WARM_START, DemoSettings, run_demo
    from mrl.observe.console import Console  # with what follows it loads torch and Ray

    settings = DemoSettings(directory, arguments.seed, arguments.algorithm, arguments.tp, arguments.pp, arguments.steps)
    result = run_demo(settings, Console(arguments.steps))
    if result.after is None:
        print(f"stopped and saved; it goes on with: mrl train {result.config}")
        return EXIT_STOPPED
    total = sum(result.seconds.values())
    print(f"\n{100 * result.before:.1f} % before, {100 * result.after:.1f} % after, in {total / 60:.1f} minutes:")
    for name, seconds in result.seconds.items():
        print(f"  {name:<18} {seconds:6.1f} s")
    print(f"report: {write_report(directory / 'ppo')}")
    print(f"next: mrl train {result.config} run.name=mine training.steps=100")
    if not result.is_success:
        print(f"goal missed: at most {100 * MAX_WARM_START:.0f} % before and at least {100 * GOAL:.0f} % after")
    return 0 if result.is_success else 1
