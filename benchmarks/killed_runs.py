"""A whole run that is killed at random moments and resumed each time.

    python benchmarks/killed_runs.py [--kills 50] [--mode synchronous] [--json FILE]

`mrl train` with an actor of two ranks and a critic saves after every step. SIGKILL hits the started process, or now and
then one of its workers, between the start and a few steps later. Each next attempt must find a checkpoint in which
every file has the hash in the manifests, and never an older one than the previous attempt. In the end, the metrics of
all steps must equal those of an undisturbed run. With batches drawn ahead and weights in flight they cannot be equal,
because the arrival of weights depends on timing. Then each step must have trained samples of the same prompts, without
losing or repeating any.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Benchmark, parser
from mrl.config.resolved.run_directory import steps_in
from mrl.events import PhaseEnd, Warned, WorkersStarted, read_events
from mrl.observe.metrics import read_metrics, without_clock

ROOT = Path(__file__).resolve().parent.parent
MAIN = "import sys; from mrl.cli.main import main; sys.exit(main())"
LIMIT_S = 300.0
CONFIG = """\
run: {{name: killed, dir: {directory}}}
cluster: {{devices_per_node: 2, device: cpu}}
placement: {{pools: {{all: 2}}, roles: {{actor: all, critic: all}}}}
model: {{path: {model}}}
algorithm: {{advantage: gae, kl: {{where: both, coef: 0.01}}}}
batch: {{prompts_per_step: 8, samples_per_prompt: 2, samples_per_update: 8}}
actor: {{parallel: {{tp: 2}}, dtype: float32, max_tokens_per_device: 128, optimizer: {{lr: 1e-3}}}}
critic: {{dtype: float32, max_tokens_per_device: 128, optimizer: {{lr: 1e-3}}}}
rollout: {{engine: {engine}, replicas: 1, max_prompt_tokens: 16, max_response_tokens: 8{vllm}}}
data: {{train: {{sums: {{dataset: "toy:addition", options: {{part: train}}}}}}}}
reward: {{functions: {{right: {{name: digits}}}}, num_workers: 1}}
training: {{steps: 100000, save_every: 1, keep: 2}}
"""
APART = ("placement={pools: {all: 2, engines: 1}, roles: {actor: all, critic: all, rollout: engines}}",)
AHEAD = ("cluster.devices_per_node=3", "algorithm.correction={level: token}", "training.samples_every=1")
MODES: dict[str, tuple[str, ...]] = {
    "synchronous": (),
    "between": (*APART, *AHEAD, "asynchrony.ahead=1"),
    "in_flight": (*APART, *AHEAD, "asynchrony={ahead: 2, weights: in_flight}"),
    "carried": (*AHEAD, "asynchrony={ahead: 1, weights: in_flight}"),
}
VLLM = ", vllm: {enforce_eager: true, kv_cache_memory_bytes: 67108864}"


@dataclass
class Attempt:
    """A run under way."""

    process: subprocess.Popen[bytes]
    directory: Path
    log: Path

    def await_team(self, times_before: int) -> None:
        """Wait until all workers of this attempt have started."""
        deadline = time.monotonic() + LIMIT_S
        while num_starts(self.directory) <= times_before:
            if self.process.poll() is not None:
                raise SystemExit(f"the run ended by itself:\n{self.log.read_text()[-4000:]}")
            if time.monotonic() > deadline:
                raise SystemExit(f"no workers started within {LIMIT_S:g} s:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.05)

    def kill(self, victim: str) -> None:
        """Kill the command itself, or one rank of its actor, after which the run ends by itself."""
        if self.process.poll() is not None:
            raise SystemExit(f"the run ended by itself:\n{self.log.read_text()[-4000:]}")
        os.kill(self.process.pid if victim == "command" else newest_actor(self.directory)[-1], signal.SIGKILL)
        self.process.wait(LIMIT_S)


def start(config: Path, name: str, *overrides: str) -> Attempt:
    """Start the command like a user."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    log = config.parent / f"{name}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", MAIN, "train", str(config), f"run.name={name}", *overrides],
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment | {"PYTHONPATH": str(ROOT)},
        )
    return Attempt(process, config.parent / "runs" / name, log)


def num_starts(run: Path) -> int:
    """Return how often all workers of a run have started."""
    events = run / "events.jsonl"
    if not events.exists():
        return 0
    return sum(isinstance(r.event, PhaseEnd) and r.event.phase == "start" for r in read_events(events))


def newest_actor(run: Path) -> list[int]:
    """Return the processes of the last started actor."""
    started = [record.event for record in read_events(run / "events.jsonl")]
    return [e.pids for e in started if isinstance(e, WorkersStarted) and e.role == "actor"][-1]


def figures(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run, without timing."""
    return [without_clock(line) for line in read_metrics(run / "metrics.jsonl")]


def draws(run: Path, steps: int) -> list[list[str]]:
    """Return the prompts of each step's samples."""
    paths = [run / "samples" / f"step-{step:06d}.parquet" for step in range(1, steps + 1)]
    return [sorted(pq.read_table(path, columns=["uid"])["uid"].to_pylist()) for path in paths]


def finish(config: Path, name: str, steps: int, *overrides: str) -> str:
    """Run to a step, and return the output."""
    attempt = start(config, name, f"training.steps={steps}", *overrides)
    if attempt.process.wait(LIMIT_S + 10 * steps):
        raise SystemExit(f"{name} exited with {attempt.process.returncode}:\n{attempt.log.read_text()[-4000:]}")
    return attempt.log.read_text()


def torment(bench: Benchmark, config: Path, kills: int, chance: random.Random, overrides: Sequence[str]) -> int:
    """Kill and resume the run repeatedly. Return the newest saved step."""
    newest = 0
    for number in range(kills):
        began = time.monotonic()
        run = config.parent / "runs" / "killed"
        starts = num_starts(run)
        attempt = start(config, "killed", *overrides)
        if number % 10 == 9:  # before training starts
            victim = "command"
            time.sleep(chance.uniform(0, 10))
        else:
            victim = "actor" if number % 10 == 4 else "command"
            attempt.await_team(starts)
            time.sleep(chance.uniform(0, 6))
        attempt.kill(victim)
        output = attempt.log.read_text()
        resumed_steps = [line.rpartition("step-")[2] for line in output.splitlines() if "resumed from" in line]
        resumed = int(resumed_steps[0]) if resumed_steps else None
        bench.row(
            kill=number + 1,
            victim=victim,
            after_s=time.monotonic() - began,
            newest_before=newest,
            resumed_from=resumed,
            refused="damaged" in output,
        )
        newest = max(steps_in(run / "checkpoints"), default=0)
    return newest


def main() -> int:
    """Run many attempts, a last one to the end, and an undisturbed run."""
    options = parser("A whole run, killed at random moments and resumed.")
    options.add_argument("--kills", type=int, default=50)
    options.add_argument("--seed", type=int, default=1, help="seed of the moments")
    options.add_argument("--mode", choices=MODES, default="synchronous", help="how far generation runs ahead, and how")
    options.add_argument("--engine", choices=("vllm", "transformers"), default="vllm")
    arguments = options.parse_args()
    from mrl.demo.model import make_model

    name = "killed_runs" if arguments.mode == "synchronous" else f"killed_runs_{arguments.mode}"
    bench, overrides = Benchmark(name), MODES[arguments.mode]
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        model, config = make_model(directory / "model", seed=1), directory / "run.yaml"
        vllm = VLLM if arguments.engine == "vllm" else ""
        config.write_text(CONFIG.format(directory=directory / "runs", model=model, engine=arguments.engine, vllm=vllm))
        newest = torment(bench, config, arguments.kills, random.Random(arguments.seed), overrides)
        steps = newest + 1
        finish(config, "killed", steps, *overrides)
        finish(config, "undisturbed", steps, *overrides)
        killed, undisturbed = (directory / "runs" / name for name in ("killed", "undisturbed"))
        is_exact = arguments.mode in ("synchronous", "between")
        figures_match = figures(killed) == figures(undisturbed)
        same_draws = arguments.mode == "synchronous" or draws(killed, steps) == draws(undisturbed, steps)
        events = list(read_events(killed / "events.jsonl"))
        unfinished = sum(isinstance(r.event, Warned) and r.event.about == "checkpoint" for r in events)
    resumed = [row for row in bench.rows if row["resumed_from"] is not None]
    print(f"{len(resumed)} attempts resumed, {unfinished} saves were cut short, {steps} steps in total")
    wrong = [row for row in resumed if row["resumed_from"] != row["newest_before"]] + [
        row for row in bench.rows if row["refused"]
    ]
    bench.goal("resumes that found something else than the newest checkpoint", len(wrong), at_most=0)
    if is_exact:
        bench.goal("figures of all steps are those of an undisturbed run", int(figures_match), at_least=1)
    if arguments.mode != "synchronous":
        bench.goal("steps trained the draws of an undisturbed run", int(same_draws), at_least=1)
    bench.goal("steps that were done", steps, at_least=arguments.kills // 5)
    return bench.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())
