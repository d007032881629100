"""Common parts of the benchmarks: interleaved timing, rows, goals, facts about the machine, and one JSON file.

    bench = Benchmark("data_plane")
    times = interleave({"ours": ours, "peer": peer}, repeats=5)
    bench.row(name="hop", **times["ours"].columns("ours"), speedup=speedup(times["ours"], times["peer"]))
    bench.goal("speedup of a hop", speedup(times["ours"], times["peer"]), at_least=10)
    return bench.finish(arguments)

The exit status is 1 if a goal is missed. A difference smaller than the spread of the timings counts as no difference.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mrl.libraries import versions
from mrl.preflight import node_facts
from mrl.preflight.node_facts import memory_bytes


@dataclass(frozen=True)
class Timing:
    """Durations of repeated runs of one thing."""

    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """Median, which a single disturbed repeat cannot change much."""
        return statistics.median(self.seconds)

    @property
    def spread_s(self) -> float:
        """Interquartile range, which a single disturbed repeat cannot change much."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return high - low

    def columns(self, name: str) -> dict[str, float]:
        """Return median and spread as columns of a row."""
        return {f"{name}_s": self.median_s, f"{name}_spread_s": self.spread_s}


def interleave(candidates: Mapping[str, Callable[[], object]], *, repeats: int, warm_ups: int = 1) -> dict[str, Timing]:
    """Time every candidate `repeats` times in turns, so that disturbances of the machine affect all of them alike."""
    for candidate in candidates.values():
        for _ in range(warm_ups):
            candidate()
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    order = list(candidates)
    for _ in range(repeats):
        for name in order:
            begin = time.perf_counter()
            candidates[name]()
            seconds[name].append(time.perf_counter() - begin)
        order.reverse()  # no candidate always follows the same neighbor
    return {name: Timing(tuple(measured)) for name, measured in seconds.items()}


def speedup(ours: Timing, peer: Timing) -> float:
    """Return how many times faster `ours` is; exactly 1 if the difference is within the spread."""
    if abs(peer.median_s - ours.median_s) <= max(ours.spread_s, peer.spread_s):
        return 1.0
    return peer.median_s / ours.median_s


class Benchmark:
    """Collects the rows and goals of one benchmark."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rows: list[dict[str, Any]] = []
        self.goals: list[dict[str, Any]] = []
        self._load_before = os.getloadavg()

    def row(self, **columns: Any) -> None:
        """Add one line to the table."""
        self.rows.append(columns)

    def goal(self, name: str, value: float, *, at_least: float | None = None, at_most: float | None = None) -> None:
        """Add a goal with one bound. A value that is not a number misses it."""
        if at_least is not None and at_most is None:
            goal, met = f">= {at_least:g}", value >= at_least
        elif at_most is not None and at_least is None:
            goal, met = f"<= {at_most:g}", value <= at_most
        else:
            raise ValueError(f'goal "{name}" needs either at_least or at_most')
        self.goals.append({"name": name, "goal": goal, "value": value, "met": met})

    def report(self) -> dict[str, Any]:
        """Return the content of the JSON file. It describes the machine, but does not name it."""
        load = {"load_average_before": self._load_before, "load_average_after": os.getloadavg()}
        return {
            "benchmark": self.name,
            "command": command(sys.argv),
            "machine": self._machine | load,
            "versions": self._versions,
            "rows": self.rows,
            "goals": self.goals,
        }

    @cached_property
    def _machine(self) -> dict[str, Any]:
        return {
            "cpu": node_facts.cpu_model(),
            "cores": node_facts.usable_cpus(),
            "memory_bytes": memory_bytes(),
            "gpus": node_facts.gpus(),
        }

    @cached_property
    def _versions(self) -> dict[str, str | None]:
        return versions()

    @staticmethod
    def verdict(goal: Mapping[str, Any]) -> str:
        """Return a goal as one line."""
        return f"{'met   ' if goal['met'] else 'MISSED'}  {goal['name']}: {shown(goal['value'])}, goal {goal['goal']}"

    def save(self, arguments: argparse.Namespace) -> None:
        """Write the JSON file, if one was asked for. Between rows, this keeps what a long benchmark has measured."""
        if arguments.json:
            arguments.json.write_text(json.dumps(self.report(), indent=2) + "\n")

    def finish(self, arguments: argparse.Namespace) -> int:
        """Print the table and the goals, write the JSON file, and return the exit status."""
        print("\n".join(table(self.rows)))
        for goal in self.goals:
            print(self.verdict(goal))
        self.save(arguments)
        return 0 if all(goal["met"] for goal in self.goals) else 1


def command(words: Sequence[str]) -> str:
    """Return the command line that reproduces a run, without its results file."""
    file, *arguments = words
    if "--json" in arguments:
        at = arguments.index("--json")
        del arguments[at : at + 2]
    return " ".join(["python", f"benchmarks/{Path(file).name}", *arguments])


def parser(description: str, repeats: int = 5) -> argparse.ArgumentParser:
    """Return a parser with the common arguments of all benchmarks."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    options.add_argument("--repeats", type=int, default=repeats, help=f"timings of each candidate (default {repeats})")
    return options


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return rows as aligned lines under their column names. Rows may have missing columns."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = [columns, *([shown(row.get(column, "")) for column in columns] for row in rows)]
    widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]


def shown(value: Any) -> str:
    """Return a figure in the format of the tables."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
