"""A long run with scheduled faults, whose processes, files and memory are watched.

    python benchmarks/soak.py [--steps 1000] [--faults 44] [--seed 1] [--directory DIR] [--json FILE]

`mrl train` of a tiny model with a real engine, compared with an undisturbed run. A seed draws the step of each fault;
all kinds take turns. At the end, the metrics of all steps must equal those of the undisturbed run, every fault must
have left a trace, and nothing may have grown with the number of steps: memory, open files, shared memory, files next to
checkpoints. With the same directory, an interrupted soak continues.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Benchmark, parser
from benchmarks.killed_runs import LIMIT_S, Attempt, figures, finish, start
from mrl.config.resolved.run_directory import steps_in
from mrl.controller.node_agent import read_process
from mrl.events import Event, ReplicaLost, Retried, RunRestarted, WorkersStarted, read_events

CONFIG = """\
run: {{name: soak, dir: {directory}}}
cluster: {{devices_per_node: 1, device: cpu}}
placement: {{pools: {{all: 1}}, roles: {{actor: all}}}}
model: {{path: {model}}}
algorithm: {{advantage: grpo}}
batch: {{prompts_per_step: 4, samples_per_prompt: 4, samples_per_update: 16}}
actor: {{dtype: float32, max_tokens_per_device: 128, optimizer: {{lr: 1e-4}}}}
rollout:
  replicas: 1
  max_prompt_tokens: 16
  max_response_tokens: 8
  vllm: {{enforce_eager: true, kv_cache_memory_bytes: 67108864}}
data: {{train: {{sums: {{dataset: "toy:addition", options: {{part: train}}}}}}}}
reward:
  functions: {{chance: {{name: "benchmarks.soak_parts:reward"}}}}
  num_workers: 1
  limit_s: 5
  retries: 2
  environment: {{SOAK_FAULTS: {faults}}}
deadlines: {{call_s: 60, heartbeat_s: 2}}
training:
  steps: {steps}
  save_every: 5
  keep: 2
  max_restarts: 5
  max_failed_saves: 1000
  samples_every: 0
  trackers: ["benchmarks.soak_parts:Tracker"]
"""
NOT_COMPARED = ("mismatch/", "reward/retr", "rollout/retr")
"""Prefixes of metrics that a fault may change: bits of log-probs depend on the samples generated together."""
WATCH_S = 0.5
JUDGED = {"raylet/raylet", "gcs/gcs_server", "--attempt", "ray::"}
"""Ray, the driver and the workers: one of each must live long enough to judge its growth."""
_LINE_BYTES = 1 << 16
WARM, MIN_STEPS = 0.2, 150
"""Share of a process's life in which it may grow: libraries load on first use, and a raylet takes 60 steps for that.

A process with fewer steps after it may still be warming up.
"""
LIMITS = {"rss_mib": 0.05, "files": 2.0, "shared_mib": 16.0, "entries": 4.0}
"""Limits of growth in 100 steps: share of resident memory, open files, MiB in /dev/shm, entries of the run."""


@dataclass
class Soak:
    """The run, with its processes and files."""

    config: Path
    chance: random.Random
    attempt: Attempt
    done: list[dict[str, Any]] = field(default_factory=list)

    @property
    def run(self) -> Path:
        return self.attempt.directory

    @property
    def faults(self) -> Path:
        """File with all faults so far, for a soak that continues."""
        return self.config.parent / "faults.jsonl"

    def note(self, fault: dict[str, Any]) -> None:
        self.done.append(fault)
        with self.faults.open("a") as file:
            file.write(json.dumps(fault) + "\n")

    def step(self) -> int:
        """Return the newest step with written metrics."""
        with suppress(FileNotFoundError, IndexError), (self.run / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LINE_BYTES))
            return int(json.loads(file.read().split(b"\n")[-2])["step"])
        return 0

    def events(self) -> list[Event]:
        path = self.run / "events.jsonl"
        return [record.event for record in read_events(path)] if path.exists() else []

    def worker(self, role: str) -> int:
        """Return the last started process of a role; 0 while none runs."""
        pids = [event.pids[-1] for event in self.events() if isinstance(event, WorkersStarted) and event.role == role]
        return pids[-1] if pids and (read_process(pids[-1]) or "Z")[0] not in "ZX" else 0

    def named(self, name: str) -> int:
        """Return the newest process of the run with this text in its command; 0 if none runs."""
        pids = [pid for pid, command in processes_below(self.attempt.process.pid) if name in command]
        return max(pids, default=0)


Fault = Callable[[Soak], bool]
"""Causes the fault. Returns whether there was something to apply it to."""


def signalled(who: Callable[[Soak], int], number: signal.Signals) -> Fault:
    def fault(soak: Soak) -> bool:
        pid = who(soak)
        with suppress(ProcessLookupError):
            if pid:
                os.kill(pid, number)
                return True
        return False

    return fault


def restarted(number: signal.Signals) -> Fault:
    """Return a fault that ends the command by this signal and starts it again."""

    def fault(soak: Soak) -> bool:
        os.kill(soak.attempt.process.pid, number)
        soak.attempt.process.wait(LIMIT_S)
        soak.attempt = start(soak.config, "soak")
        return True

    return fault


def requested(name: str) -> Fault:
    """Return a fault that the run's own reward or tracker causes once, when it finds this file."""

    def fault(soak: Soak) -> bool:
        (soak.config.parent / "faults" / name).touch()
        return True

    return fault


def full_disk(soak: Soak) -> bool:
    """Keep the driver's files from growing for a while, as on a full disk. Processes started meanwhile inherit this.

    A run that starts on a full disk ends with an error, so this waits until the run trains again.
    """
    if soak.done and soak.step() <= soak.done[-1]["step"]:
        return False
    pid = soak.named("--attempt")
    with suppress(ProcessLookupError):
        if pid and soak.worker("rollout-0") and soak.worker("actor"):
            before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
            time.sleep(soak.chance.uniform(2, 5))
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
            return True
    return False


FAULTS: dict[str, Fault] = {
    "engine killed": signalled(lambda soak: soak.worker("rollout-0"), signal.SIGKILL),
    "reward worker killed": requested("die"),
    "actor killed": signalled(lambda soak: soak.worker("actor"), signal.SIGKILL),
    "reward raises": requested("raise"),
    "engine stopped": signalled(lambda soak: soak.worker("rollout-0"), signal.SIGSTOP),
    "disk full": full_disk,
    "saved and stopped": restarted(signal.SIGTERM),
    "reward hangs": requested("hang"),
    "actor stopped": signalled(lambda soak: soak.worker("actor"), signal.SIGSTOP),
    "tracker raises": requested("tracker"),
    "command killed": restarted(signal.SIGKILL),
    "reward crawls": requested("crawl"),
    "driver killed": signalled(lambda soak: soak.named("--attempt"), signal.SIGKILL),
    "raylet killed": signalled(lambda soak: soak.named("raylet/raylet"), signal.SIGKILL),
    "GCS killed": signalled(lambda soak: soak.named("gcs/gcs_server"), signal.SIGKILL),
}


ENDS = {
    *("actor killed", "actor stopped", "saved and stopped", "command killed"),
    *("driver killed", "raylet killed", "GCS killed"),
}
"""Faults that end the driver or Ray."""


def processes_below(root: int) -> Iterator[tuple[int, str]]:
    """Yield a process and all of its descendants, with their commands."""
    children: dict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                children[int((entry / "stat").read_text().rpartition(")")[2].split()[1])].append(int(entry.name))
    remaining = [root]
    while remaining:
        pid = remaining.pop()
        remaining += children[pid]
        with suppress(OSError):
            yield pid, (Path("/proc") / str(pid) / "cmdline").read_text().replace("\0", " ")


@dataclass
class Watch:
    """Samples of every process and directory, by step."""

    soak: Soak
    path: Path
    at: float = 0.0

    def look(self) -> None:
        """Write a sample, at most twice per second."""
        if time.monotonic() - self.at < WATCH_S or not self.soak.run.exists():
            return
        self.at = time.monotonic()
        step, samples = self.soak.step(), []
        for pid, command in processes_below(self.soak.attempt.process.pid):
            with suppress(OSError):
                rss = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
                files = len(os.listdir(f"/proc/{pid}/fd"))
                samples.append({"pid": pid, "what": label(command), "rss_mib": rss, "files": files})
        shared = sum(entry.stat().st_blocks for entry in Path("/dev/shm").iterdir()) / 2**11
        entries = len(list(self.soak.run.iterdir()))
        line = {"step": step, "processes": samples, "shared_mib": shared, "entries": entries}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def label(command: str) -> str:
    """Return the name of a command without its variable parts."""
    for name in ("raylet/raylet", "gcs/gcs_server", "--attempt", "rewards", "keeper", "ray::", "VLLM", "mrl.cli.main"):
        if name in command:
            return name
    return Path(command.split(" ")[0]).name


def growth(lines: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the growth in 100 steps of each long-lived process and of the directories."""
    lives: dict[tuple[str, int], list[tuple[int, float, float]]] = defaultdict(list)
    for line in lines:
        for process in line["processes"]:
            lives[process["what"], process["pid"]].append((line["step"], process["rss_mib"], process["files"]))
    for (what, pid), life in lives.items():
        first = min(step for step, _, _ in life)
        trained = life[max(at for at, sample in enumerate(life) if sample[0] == first) :]  # not while it starts
        warm = trained[int(len(trained) * WARM) :]
        if warm[-1][0] - warm[0][0] >= MIN_STEPS:
            steps = [step for step, _, _ in warm]
            rss, files = (
                per_100([(step, sample[k]) for step, sample in zip(steps, warm, strict=True)]) for k in (1, 2)
            )
            mean = statistics.mean(sample[1] for sample in warm)
            yield {"what": what, "pid": pid, "steps": steps[-1] - steps[0], "rss_mib": rss / mean, "files": files}
    for name in ("shared_mib", "entries"):
        points = [(line["step"], float(line[name])) for line in lines]
        yield {"what": name, "steps": points[-1][0], name: per_100(points[int(len(points) * WARM) :])}


def per_100(points: list[tuple[int, float]]) -> float:
    """Return the slope of a regression line through the points, per 100 steps."""
    steps, values = [float(step) for step, _ in points], [value for _, value in points]
    return 100 * statistics.linear_regression(steps, values).slope if len(set(steps)) > 1 else 0.0


def schedule(num_steps: int, num_faults: int, chance: random.Random) -> list[tuple[int, str]]:
    """Return the faults by step: all kinds in turn, at random steps, none in the last tenth.

    In the second half, only faults that the driver and Ray survive occur, so that their growth can be measured over it.
    """
    kinds = (list(FAULTS) * (num_faults // len(FAULTS) + 1))[:num_faults]
    last = {kind: int(num_steps * (0.5 if kind in ENDS else 0.9)) for kind in FAULTS}
    return sorted((chance.randrange(2, last[kind]), kind) for kind in kinds)


def torment(soak: Soak, watch: Watch, planned: list[tuple[int, str]], num_steps: int) -> None:
    """Cause each fault at its step, until the run has ended."""
    due, last_step, since = list(planned), -1, time.monotonic()
    while True:
        watch.look()
        code = soak.attempt.process.poll()
        if code is not None:
            if code:
                raise SystemExit(f"the run exited with {code}:\n{soak.attempt.log.read_text()[-4000:]}")
            return
        step = soak.step()
        if step != last_step:
            last_step, since = step, time.monotonic()
        elif time.monotonic() - since > LIMIT_S:
            raise SystemExit(f"no progress after step {step}:\n{soak.attempt.log.read_text()[-4000:]}")
        if due and step >= due[0][0] and step < num_steps:
            time.sleep(soak.chance.uniform(0, 1))
            if FAULTS[due[0][1]](soak):
                soak.note({"fault": due[0][1], "step": step})
                print(f"{time.strftime('%H:%M:%S')} after step {step}: {due[0][1]}", flush=True)
                del due[0]
                last_step, since = -1, time.monotonic()
        time.sleep(0.05)


def compared(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if not name.startswith(NOT_COMPARED)} for line in lines]


def prepare(directory: Path, num_steps: int) -> Path:
    """Write the configuration, unless it exists."""
    config = directory / "run.yaml"
    (directory / "faults").mkdir(exist_ok=True)
    if not config.exists():
        from mrl.demo.model import make_model

        model = make_model(directory / "model", seed=1)
        names = {"directory": directory / "runs", "model": model, "faults": directory / "faults"}
        config.write_text(CONFIG.format(steps=num_steps, **names))
    return config


def main() -> int:
    """Run without faults, then with faults, and report."""
    options = parser("A long run with faults, watched.")
    options.add_argument("--steps", type=int, default=1000)
    options.add_argument("--faults", type=int, default=3 * len(FAULTS))
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--directory", type=Path, help="a directory to keep, in which an interrupted soak continues")
    arguments = options.parse_args()
    bench, chance = Benchmark("soak"), random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as made:
        directory = arguments.directory or Path(made)
        directory.mkdir(exist_ok=True)
        config = prepare(directory, arguments.steps)
        began = time.monotonic()
        if arguments.steps not in steps_in(directory / "runs" / "undisturbed" / "checkpoints"):
            finish(config, "undisturbed", arguments.steps)
        undisturbed_s = time.monotonic() - began
        planned = schedule(arguments.steps, arguments.faults, chance)
        soak = Soak(config, chance, start(config, "soak"))
        if soak.faults.exists():
            soak.done += map(json.loads, soak.faults.read_text().splitlines())
        watch = Watch(soak, directory / "watch.jsonl")
        begun = soak.step()
        torment(soak, watch, [fault for fault in planned if fault[0] > begun], arguments.steps)
        report(bench, soak, watch, directory, arguments.steps)
        bench.row(what="seconds", undisturbed=undisturbed_s, under_faults=time.monotonic() - began - undisturbed_s)
    return bench.finish(arguments)


def report(bench: Benchmark, soak: Soak, watch: Watch, directory: Path, num_steps: int) -> None:
    """Add rows and goals for the faults, the run's reactions, and growth."""
    for name, num in sorted(Counter(fault["fault"] for fault in soak.done).items()):
        bench.row(fault=name, num=num)
    events = soak.events()
    for kind in (RunRestarted, ReplicaLost, Retried):
        bench.row(event=kind.kind, num=sum(isinstance(event, kind) for event in events))
    ours, theirs = (compared(figures(directory / "runs" / name)) for name in ("soak", "undisturbed"))
    different = [mine["step"] for mine, other in zip(ours, theirs, strict=True) if mine != other]
    bench.goal("faults", len(soak.done), at_least=40 if num_steps >= 1000 else 1)
    bench.goal("steps that were done", len(ours), at_least=num_steps)
    bench.goal("steps whose figures differ from the undisturbed run's", len(different), at_most=0)
    bench.goal("checkpoints that are kept", len(steps_in(soak.run / "checkpoints")), at_most=2)
    lines = [json.loads(line) for line in watch.path.read_text().splitlines()]
    worst: dict[str, float] = defaultdict(float)
    judged = set()
    for row in growth(lines):
        bench.row(**row)
        judged.add(row["what"])
        for name in LIMITS.keys() & row.keys():
            worst[name] = max(worst[name], row[name])
    kinds = len(JUDGED & judged)
    bench.goal("of raylet, GCS, driver and workers, judged", kinds, at_least=len(JUDGED) if num_steps >= 1000 else 0)
    for name, limit in LIMITS.items():
        bench.goal(f"{name} that 100 steps add", worst[name], at_most=limit)


if __name__ == "__main__":
    sys.exit(main())
