"""Overhead of conversations beyond waiting for engines and tools, and their cost for runs that have none.

    python benchmarks/agents_cost.py [--repeats N] [--json FILE]
    python benchmarks/agents_cost.py --tree DIRECTORY     # another checkout of mrl, in turns with this one

The loop runs 500 conversations of one to eight turns, and 64, so that none waits for an engine: with real environments
in two processes, a real chat template, and a tool that takes 0.2 s. The engine is scripted: it writes 64 turns at a
time, each in 0.3 s. `least_s` is the time for the same turns and answers if nothing else takes any time, computed event
by event; `ratio` is the loop's time divided by it. Separate engine processes and their scheduler are not included.

With `--tree`, both checkouts train the demo's model for some steps of single turns, with their own `mrl train`. The
results are the medians over all runs of the seconds of a step and of its rollout, without each run's first two steps.
"""

from __future__ import annotations

import argparse
import heapq
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Benchmark, Timing, parser, speedup
from benchmarks.killed_runs import MAIN, ROOT
from mrl.demo.model import make_model
from mrl.observe.metrics import read_metrics
from mrl.rollout.requests import Generated, GenerationRequest
from tests.agents.scripted import Stage, call

AT_ONCE, MAX_TURNS = 64, 8
CONVERSATIONS = (500, AT_ONCE)
TURN_S, TOOL_S = 0.3, 0.2
MAX_RATIO, MAX_STEP_RATIO = 1.15, 1.05
STEPS, SETTLING_STEPS, LIMIT_S = 12, 2, 400.0
CONFIG = """\
run: {{name: "{name}", dir: {directory}}}
cluster: {{devices_per_node: 1, device: cpu}}
placement: {{pools: {{all: 1}}, roles: {{actor: all}}}}
model: {{path: {directory}/model}}
algorithm: {{advantage: grpo}}
batch: {{prompts_per_step: 32, samples_per_prompt: 8, samples_per_update: 256}}
actor: {{dtype: float32, max_tokens_per_device: 4096, optimizer: {{lr: 1e-5}}}}
rollout: {{engine: transformers, replicas: 1, max_prompt_tokens: 16, max_response_tokens: 8}}
data: {{train: {{sums: {{dataset: "toy:addition"}}}}}}
reward: {{functions: {{right: {{name: digits}}}}, num_workers: 1}}
training: {{steps: {steps}, save_every: 0}}
"""


def num_turns(row: int) -> int:
    """Return the number of turns in a conversation, including its answer."""
    return 1 + row % MAX_TURNS


class TimedStage(Stage):
    """An engine that writes a fixed number of turns at a time, each in the same time."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, lambda context: "", max_turns=MAX_TURNS, options={"delay_s": TOOL_S})
        self._call, self._answer = self.ids(call("a")), self.ids("ocean<|im_end|>")

    def _generate(self) -> Iterator[Generated]:
        """Yield turns as they are written.

        The engine starts its next turn when it is free, independent of the driver.
        """
        writing: list[tuple[float, int, GenerationRequest]] = []
        free, num_asked = [0.0] * AT_ONCE, 0
        while True:
            for request in self.dialogs.take():
                written = max(time.perf_counter(), heapq.heappop(free)) + TURN_S
                heapq.heappush(free, written)
                heapq.heappush(writing, (written, num_asked, request))
                num_asked += 1
            arriving = self.dialogs.arriving()
            if not writing and arriving is None:
                return
            left_s = max(0.0, writing[0][0] - time.perf_counter()) if writing else None
            if arriving is None:
                time.sleep(left_s or 0.0)
            else:
                wait([arriving], left_s)
            while writing and writing[0][0] <= time.perf_counter():
                yield self._turn(heapq.heappop(writing)[2])

    def _turn(self, request: GenerationRequest) -> Generated:
        row, _, turn = request.key.partition("/")
        ids = self._answer if int(turn or 0) == num_turns(int(row)) - 1 else self._call
        return Generated(request.key, ids, np.full(len(ids), -0.5, np.float32), "stop", 1, replica=0)


def least_seconds(conversations: int) -> float:
    """Return the shortest time for this many conversations, if only turns and tools take time.

    The longest wait goes first.
    """
    ready = [(0.0, row, 0) for row in range(conversations)]
    free, end = [0.0] * AT_ONCE, 0.0
    while ready:
        at, row, turn = heapq.heappop(ready)
        written = max(at, heapq.heappop(free)) + TURN_S
        heapq.heappush(free, written)
        end = max(end, written + TOOL_S)  # the last turn also gets an answer
        if turn + 1 < num_turns(row):
            heapq.heappush(ready, (written + TOOL_S, row, turn + 1))
    return end


def measure_loop(bench: Benchmark, conversations: int, repeats: int) -> None:
    """Add one row: the median of several rollouts on the same processes."""
    with tempfile.TemporaryDirectory() as directory:
        stage = TimedStage(Path(directory))
        facts = {"facts": {"a": "The ocean is wide. " * 10}}
        openings = [stage.opening(row, "ocean", max_tokens=4000, **facts) for row in range(conversations)]
        seconds, driver = [], []
        for _ in range(repeats + 1):
            began, used = time.perf_counter(), time.process_time()
            dialogs = stage.run(*openings)
            seconds.append(time.perf_counter() - began)
            driver.append(time.process_time() - used)
            turns = sum(len(dialog.ended_conversation.turns) for dialog in dialogs)
            if turns != sum(map(num_turns, range(conversations))) or {dialog.score for dialog in dialogs} != {1.0}:
                raise SystemExit(
                    f"{turns} turns, scores { ({dialog.score for dialog in dialogs}) }: not the expected result"
                )
        stage.stack.close()
    timing, least_s = Timing(tuple(seconds[1:])), least_seconds(conversations)
    ratio = timing.median_s / least_s
    cpu_ms = 1e3 * statistics.median(driver[1:]) / turns
    bench.row(
        conversations=conversations, turns=turns, least_s=least_s, **timing.columns("loop"), ratio=ratio,
        driver_cpu_ms_per_turn=cpu_ms,
    )  # fmt: skip
    bench.goal(f"{conversations} conversations: seconds over those of turns and tools alone", ratio, at_most=MAX_RATIO)


def train(tree: Path, directory: Path, name: str) -> list[dict[str, float]]:
    """Return the metrics of single-turn steps, run with the code of a checkout."""
    config = directory / f"{name}.yaml"
    config.write_text(CONFIG.format(name=name, directory=directory, steps=STEPS))
    command = [sys.executable, "-c", MAIN, "train", str(config)]
    result = subprocess.run(
        command, cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)}, capture_output=True, text=True, timeout=LIMIT_S
    )
    if result.returncode:
        raise SystemExit(f"{tree}: {result.stdout[-2000:]}{result.stderr[-2000:]}")
    return read_metrics(directory / name / "metrics.jsonl")[SETTLING_STEPS:]


def measure_trees(bench: Benchmark, other: Path, repeats: int) -> None:
    """Add a row for each checkout, and the ratio of their step times."""
    trees, lines = {"this": ROOT, "other": other.resolve()}, dict[str, list[dict[str, float]]](this=[], other=[])
    with tempfile.TemporaryDirectory() as directory:
        make_model(Path(directory) / "model", seed=1)
        for number in range(repeats):
            for name in sorted(trees, reverse=bool(number % 2)):
                lines[name] += train(trees[name], Path(directory), f"{name}-{number}")
    steps = {name: Timing(tuple(line["timing_s/step"] for line in lines[name])) for name in trees}
    for name in trees:
        rollout = Timing(tuple(line["timing_s/rollout"] for line in lines[name]))
        bench.row(tree=name, **steps[name].columns("step"), **rollout.columns("rollout"))
    ratio = 1 / speedup(steps["this"], steps["other"])
    bench.goal("single turns: seconds of a step over the other checkout's", ratio, at_most=MAX_STEP_RATIO)


def main() -> int:
    """Measure, print the results, and return whether the goals are met."""
    options: argparse.ArgumentParser = parser("Overhead of conversations beyond waiting for engines and tools.")
    options.add_argument("--tree", type=Path, metavar="DIRECTORY", help="another checkout to compare single turns with")
    arguments = options.parse_args()
    bench = Benchmark("agents_cost")
    if arguments.tree is None:
        for conversations in CONVERSATIONS:
            measure_loop(bench, conversations, arguments.repeats)
    else:
        measure_trees(bench, arguments.tree, arguments.repeats)
    return bench.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())
