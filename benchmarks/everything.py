"""Every benchmark in turn, as run by `make bench`: one file of results, and a table of the goals.

    python benchmarks/everything.py [--only NAME ...] [--json FILE]

Each benchmark runs in a separate process with its own time limit, shortened so that all of them fit into half an hour.
If one cannot run or runs out of time, the results and the table say so. All results of a machine are in one file,
`benchmarks/results/machines/CPU-CORES.json`. Longer runs have their results in `benchmarks/results/NAME.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import peer_environments
from benchmarks.harness import shown
from mrl.preflight import node_facts

HERE = Path(__file__).resolve().parent
MACHINES = HERE / "results" / "machines"


@dataclass(frozen=True)
class Entry:
    """A benchmark in its short version."""

    name: str
    limit_s: int
    options: tuple[str, ...] = ()
    simulated: bool = False
    """Whether its figures are computed rather than measured."""

    @property
    def command(self) -> list[str]:
        """Return the command that reproduces the results."""
        return ["python", f"benchmarks/{self.name}.py", *self.options]


ENTRIES = (
    Entry("data_plane", 240),
    Entry("controller", 300),
    Entry("controller_scale", 600),
    Entry("agents_cost", 180, ("--repeats", "3")),
    Entry("parity", 400, ("--quick",)),
    Entry("packing", 120, ("--quick",), simulated=True),
    Entry("logprob", 180, ("--quick", "--hidden", "256")),
    Entry("reshard", 600, ("--quick",)),
    Entry("reshard_hosts", 240, ("--quick",)),
    Entry("algorithms", 200),
    Entry("preferences", 200),
    Entry("rewards", 150, ("--samples", "2000")),
    Entry("code_reward", 240),
    Entry("data", 200),
    Entry("startup", 180),
    Entry("step_overhead", 300, ("--only", "demo")),
    Entry("end_to_end", 420, ("--only", "tiny", "--repeats", "2")),
    Entry("scale", 180),
    Entry("plan", 30, simulated=True),
    Entry("asynchrony_plan", 90, simulated=True),
)


SIMULATED = {entry.name for entry in ENTRIES if entry.simulated} | {"reshard_plans"}
"""Benchmarks whose figures are computed rather than measured."""


@dataclass(frozen=True)
class Outcome:
    """Result of one benchmark."""

    entry: Entry
    seconds: float
    report: dict[str, Any] | None
    why: str

    def as_json(self) -> dict[str, Any]:
        """Return the entry for the file of all results."""
        run_facts = {"command": " ".join(self.entry.command), "seconds": round(self.seconds, 1)}
        entry: dict[str, Any] = {"simulated": self.entry.simulated, **run_facts}
        return {**entry, **self.report} if self.report else {**entry, "not_run": self.why}


def run(entry: Entry, out: Path) -> Outcome:
    """Run one benchmark, which writes its results to `out` and prints its progress."""
    began = time.monotonic()
    print(f"\n== {' '.join(entry.command)}", flush=True)
    command = [sys.executable, str(HERE.parent / entry.command[1]), *entry.options, "--json", str(out)]
    process = subprocess.Popen(command, cwd=HERE.parent, start_new_session=True)
    try:
        reason = f"exited with {process.wait(entry.limit_s)} and wrote no results"
    except subprocess.TimeoutExpired:
        reason = f"took more than {entry.limit_s} s"
    finally:
        with suppress(ProcessLookupError):  # all of its processes have ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    seconds = time.monotonic() - began
    return Outcome(
        entry, seconds, json.loads(out.read_text()) if out.exists() else None, "" if out.exists() else reason
    )


def own_file() -> Path:
    """Return the results file of machines like this one."""
    words = re.findall(r"[a-z0-9.]+", f"{node_facts.cpu_model()} {node_facts.usable_cpus()} cores".lower())
    return MACHINES / ("-".join(words) + ".json")


def summary(outcomes: list[Outcome]) -> list[str]:
    """Return one line per goal, and one for each benchmark that did not run."""
    lines = ["| benchmark | goal | value | |", "|---|---|---|---|"]
    for outcome in outcomes:
        name = f"`{' '.join(outcome.entry.command)}`" + (" (simulated)" if outcome.entry.simulated else "")
        if outcome.report is None:
            lines.append(f"| {name} | not run | {outcome.why} | |")
            continue
        for goal in outcome.report["goals"]:
            verdict = "met" if goal["met"] else "**missed**"
            lines.append(f"| {name} | {goal['name']} {goal['goal']} | {shown(goal['value'])} | {verdict} |")
    return lines


def main() -> int:
    """Run all benchmarks, or those named."""
    options = argparse.ArgumentParser(description="Every benchmark in turn.")
    names = [entry.name for entry in ENTRIES]
    options.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    options.add_argument("--json", type=Path, default=own_file(), metavar="FILE", help="file for the results")
    arguments = options.parse_args()
    for peer in peer_environments.ALL:  # installing peers must not count as a benchmark's time
        if failed := peer.install():
            print(failed, flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as made:
        chosen = [entry for entry in ENTRIES if entry.name in arguments.only]
        outcomes = [run(entry, Path(made) / f"{entry.name}.json") for entry in chosen]
    table = summary(outcomes)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    known = (
        json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    )  # benchmarks left out by `--only` keep their results
    known |= {outcome.entry.name: outcome.as_json() for outcome in outcomes}
    arguments.json.write_text(json.dumps(known, indent=2) + "\n")
    print("\n" + "\n".join(table))
    print(f"\n{(time.monotonic() - began) / 60:.1f} minutes")
    missed = [
        outcome
        for outcome in outcomes
        if outcome.report is None or not all(goal["met"] for goal in outcome.report["goals"])
    ]
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
