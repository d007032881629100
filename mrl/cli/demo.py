"""`mrl demo`: train a small model on this machine, to see it work."""

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
        help="to add, to add from preferences alone, or to search (default sums)",
    )
    parser.add_argument("--seed", type=int, default=1, help="of the model and of all that is drawn (default 1)")
    parser.add_argument("--algorithm", choices=ALGORITHMS, help="default ppo; the other tasks are learned by grpo")
    parser.add_argument("--tp", type=int, default=2, help="tensor parallel size of the actor (default 2)")
    parser.add_argument("--pp", type=int, default=1, help="pipeline parallel size of the actor (default 1)")
    parser.add_argument("--steps", type=int, help="of learning by reward (default 60, 50 of search, 25 of preferences)")
    parser.add_argument("--dir", help="a new directory for its files (default runs/demo-DATE)")


def run(arguments: argparse.Namespace) -> int:
    """Return 0 if the model learned what it should, EXIT_STOPPED when it was asked to stop before and has saved."""
    directory = Path(arguments.dir or f"runs/demo-{time.strftime('%Y%m%d-%H%M%S')}")
    if directory.exists():
        raise SetupError(f"{directory} exists already", fix="choose another --dir")
    task = TASKS[arguments.task]
    algorithm, steps = arguments.algorithm or next(iter(task.algorithms)), arguments.steps or task.steps
    if algorithm not in task.algorithms:
        known = ", ".join(task.algorithms)
        raise SetupError(f"{arguments.task} is not learned by {algorithm}", fix=f"--algorithm {known}")
    from mrl.demo.demo import DemoSettings, run_demo
    from mrl.observe.console import Console  # with what follows it loads torch and Ray
    from mrl.observe.metrics import read_metrics

    settings = DemoSettings(directory, arguments.seed, algorithm, arguments.tp, arguments.pp, steps, task)
    result = run_demo(settings, Console(steps))
    if result.after is None:
        print(f"stopped and saved; it goes on with: mrl train {result.config}")
        return EXIT_STOPPED
    total = sum(result.seconds.values())
    print(f"\n{100 * result.before:.1f} % before, {100 * result.after:.1f} % after, in {total / 60:.1f} minutes:")
    for name, seconds in result.seconds.items():
        print(f"  {name:<18} {seconds:6.1f} s")
    last = read_metrics(directory / task.run / "metrics.jsonl")[-1]
    for name, said in task.also.items():
        print(f"{said}: {last[name]:.2f}")
    if result.figures is not None and RIGHT_PAIRS in result.figures:
        print(f"pairs of new problems that the reward model has the right way round: {result.figures[RIGHT_PAIRS]:.1%}")
    print(f"report: {write_report(directory / task.run)}")
    print(f"next: mrl train {result.config} run.name=mine training.steps=100")
    for missed in result.missed():
        print(f"goal missed: {missed}")
    return 0 if result.is_success else 1
