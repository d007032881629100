"""Stress test of rewards: 10,000 samples of which 2 % hang and 1 % crash, in real worker processes.

    python benchmarks/rewards.py [--samples 10000] [--workers 4] [--json FILE]

Goals: all other samples get the right score, all bad ones the right kind of failure, in less than two minutes, with
bounded memory and no process left behind. Another row times good samples only: the overhead of the processes.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Benchmark, parser
from mrl.config.reward import RewardConfig, RewardFunctionConfig
from mrl.events import EventLog
from mrl.rewards.manager import RewardManager
from mrl.rewards.outcome import Failure, Score
from mrl.rewards.sample import Sample

LIMIT_S = 0.2
MARKER = "MRL_REWARD_BENCHMARK"


def score(sample: Sample) -> float:
    """Reward function that hangs, crashes, or returns the square of the row."""
    match sample.extra_info["behaviour"]:
        case "hang":
            while True:
                pass
        case "crash":
            os._exit(1)
    return float(sample.row_id**2)


def behaviour(row: int) -> str:
    """Return the behavior of a row: 2 % hang and 1 % crash, spread evenly."""
    return {7: "hang", 57: "hang", 33: "crash"}.get(row % 100, "good")


def make_sample(row: int, kind: str) -> Sample:
    """Return a sample with texts of typical size."""
    return Sample(
        prompt="What is the square of the number of this row? " * 5,
        response="Let me think about that step by step. " * 50,
        num_response_tokens=400,
        ground_truth=str(row**2),
        data_source="squares",
        extra_info={"behaviour": kind},
        uid=str(row // 8),
        row_id=row,
    )


class PeakMemory(threading.Thread):
    """Watches the total memory of supervisor and workers, which have a marker in their environment."""

    def __init__(self, marker: str) -> None:
        super().__init__(daemon=True)
        self.marker = marker
        self.peak_bytes = 0
        self.stop = threading.Event()

    def run(self) -> None:
        while not self.stop.wait(0.5):
            self.peak_bytes = max(self.peak_bytes, sum(map(proportional_bytes, marked_processes(self.marker))))


def marked_processes(marker: str) -> list[int]:
    """Return all processes with the marker in their environment, which child processes inherit."""
    pids = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and marker.encode() in (entry / "environ").read_bytes():
                pids.append(int(entry.name))
        except OSError:
            continue  # the process has ended, or belongs to another user
    return pids


def proportional_bytes(pid: int) -> int:
    """Return the memory of a process, with shared memory divided among its users."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def own_peak_bytes() -> int:
    """Return the peak memory of this process."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def measure(bench: Benchmark, name: str, kinds: list[str], num_workers: int, directory: Path) -> None:
    """Score one batch, and compare the outcomes with the expected ones."""
    marker = f"{name}-{os.getpid()}"
    config = RewardConfig(
        functions={"square": RewardFunctionConfig(name="benchmarks.rewards:score")},
        num_workers=num_workers,
        limit_s=LIMIT_S,
        retries=0,
        max_failed_share=0.05,
        memory_bytes=1 << 29,
        environment={MARKER: marker},
    )
    samples = [make_sample(row, kind) for row, kind in enumerate(kinds)]
    watch = PeakMemory(marker)
    watch.start()
    begin = time.perf_counter()
    with RewardManager(config, EventLog(directory / f"{name}.jsonl")) as manager:
        start_s = time.perf_counter() - begin
        begin = time.perf_counter()
        outcomes = manager.score(samples)
        seconds = time.perf_counter() - begin
    watch.stop.set()
    watch.join()
    left = marked_processes(marker)
    expected = {"hang": "timeout", "crash": "crashed"}
    right = Counter(
        kind
        for row, (kind, outcome) in enumerate(zip(kinds, outcomes, strict=True))
        if (isinstance(outcome, Score) and kind == "good" and outcome.value == row**2)
        or (isinstance(outcome, Failure) and outcome.kind == expected.get(kind))
    )
    counts = Counter(kinds)
    bench.row(
        name=name,
        samples=len(samples),
        workers=num_workers,
        **{f"{kind}_right": f"{right[kind]}/{counts[kind]}" for kind in ("good", "hang", "crash")},
        start_s=start_s,
        seconds=seconds,
        per_s=len(samples) / seconds,
        workers_peak_MiB=watch.peak_bytes / (1 << 20),
        own_peak_MiB=own_peak_bytes() / (1 << 20),
        left_behind=len(left),
    )
    bench.goal(f"{name}: samples with the right outcome", right.total(), at_least=len(samples))
    bench.goal(f"{name}: seconds", seconds, at_most=120)
    bench.goal(f"{name}: MiB of supervisor and workers", watch.peak_bytes / (1 << 20), at_most=500)
    bench.goal(f"{name}: processes left behind", len(left), at_most=0)


def main() -> int:
    """Run both batches."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--samples", type=int, default=10_000)
    arguments.add_argument("--workers", type=int, default=4)
    options = arguments.parse_args()
    bench = Benchmark("rewards")
    with tempfile.TemporaryDirectory() as directory:
        for name, kinds in {
            "all good": ["good"] * options.samples,
            "under fire": [behaviour(row) for row in range(options.samples)],
        }.items():
            measure(bench, name, kinds, options.workers, Path(directory))
    return bench.finish(options)


if __name__ == "__main__":
    sys.exit(main())
