"""`mrl demo`: train a small model on this machine as a demonstration."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from mrl.cli.report import write_report
from mrl.demo.tasks import RIGHT_PAIRS, SUMS, TASKS
from mrl.errors import EXIT_STOPPED, SetupError

EXAMPLE = "mrl demo --algorithm grpo --tp 2 --pp 2"
ALGORITHMS = tuple(SUMS.algorithms)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--task",
        choices=TASKS,
        default="sums",
        help="learn to add, to add from preferences only, or to search (default sums)",
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the model and of all sampling (default 1)")
    parser.add_argument("--algorithm", choices=ALGORITHMS, help="default ppo; the other tasks use grpo")
    parser.add_argument("--tp", type=int, default=2, help="tensor parallel size of the actor (default 2)")
    parser.add_argument("--pp", type=int, default=1, help="pipeline parallel size of the actor (default 1)")
    parser.add_argument(
        "--steps", type=int, help="reinforcement learning steps (default 60; 50 for search, 25 for preferences)"
    )
    parser.add_argument("--dir", help="new directory for its files (default runs/demo-DATE)")


def run(arguments: argparse.Namespace) -> int:
    """Return 0 if the model learned its task, or EXIT_STOPPED if the run was asked to stop and has saved."""
    directory = Path(arguments.dir or f"runs/demo-{time.strftime('%Y%m%d-%H%M%S')}")
    if directory.exists():
        raise SetupError(f"{directory} already exists", fix="choose another --dir")
    task = TASKS[arguments.task]
    algorithm, steps = arguments.algorithm or next(iter(task.algorithms)), arguments.steps or task.steps
    if algorithm not in task.algorithms:
        known = ", ".join(task.algorithms)
        raise SetupError(f"{arguments.task} cannot be trained with {algorithm}", fix=f"--algorithm {known}")
    from mrl.demo.demo import DemoSettings, run_demo
    from mrl.observe.console import Console  # loads torch and Ray, as do the following imports
    from mrl.observe.metrics import read_metrics

    settings = DemoSettings(directory, arguments.seed, algorithm, arguments.tp, arguments.pp, steps, task)
    result = run_demo(settings, Console(steps))
    if result.after is None:
        print(f"stopped and saved; continue with: mrl train {result.config}")
        return EXIT_STOPPED
    total = sum(result.seconds.values())
    print(f"\n{100 * result.before:.1f} % before, {100 * result.after:.1f} % after, in {total / 60:.1f} minutes:")
    for name, seconds in result.seconds.items():
        print(f"  {name:<18} {seconds:6.1f} s")
    last = read_metrics(directory / task.run / "metrics.jsonl")[-1]
    for name, label in task.also.items():
        print(f"{label}: {last[name]:.2f}")
    if result.figures is not None and RIGHT_PAIRS in result.figures:
        print(f"pairs of new problems that the reward model ranks correctly: {result.figures[RIGHT_PAIRS]:.1%}")
    print(f"report: {write_report(directory / task.run)}")
    print(f"next: mrl train {result.config} run.name=mine training.steps=100")
    for missed in result.missed():
        print(f"goal missed: {missed}")
    return 0 if result.is_success else 1
