"""Stress test of the code reward: 500 programs, 100 each right, wrong, endless, hungry and hostile, in real reward
workers.

    python benchmarks/code_reward.py [--workers 2] [--json FILE]

Goals: every program has the right score, no process and no file is left behind, and nothing outside was read, written
or reached. The last rows give the cost of a program that does next to nothing.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Benchmark, parser
from benchmarks.rewards import MARKER, marked_processes
from mrl.config.reward import RewardConfig, RewardFunctionConfig
from mrl.events import EventLog
from mrl.rewards.functions.programs import code
from mrl.rewards.manager import RewardManager
from mrl.rewards.outcome import Score
from tests.rewards.programs import ATTACKS, ENDLESS, HUNGRY, LIMITS, RIGHT, WRONG, Case, Outside, hostile

NUM_OF_A_KIND = 100
REPEATS = 50


def programs() -> dict[str, list[tuple[Case, int]]]:
    """Return each kind's programs, with the number of the task that each solves."""
    attacks = [hostile(name, attack, is_caught=True) for name, attack in ATTACKS.items()]
    attacks += [hostile(name, attack, is_caught=False) for name, attack in ATTACKS.items()]
    kinds = {"right": RIGHT, "wrong": WRONG, "endless": ENDLESS, "hungry": HUNGRY, "hostile": attacks}
    return {kind: [(cases[n % len(cases)], n) for n in range(NUM_OF_A_KIND)] for kind, cases in kinds.items()}


def measure(bench: Benchmark, kind: str, cases: list[tuple[Case, int]], num_workers: int, directory: Path) -> None:
    """Score one kind, and check for side effects. Programs that reach the limits get short limits."""
    (directory / kind).mkdir()
    limits = LIMITS if kind in ("endless", "hungry") else {}
    config = RewardConfig(
        functions={"code": RewardFunctionConfig(name="code", options={"limits": limits})},
        num_workers=num_workers,
        limit_s=60,
        retries=0,
        max_failed_share=1.0,
        environment={MARKER: f"code-{kind}"},
    )
    outside = Outside(directory / kind)
    with RewardManager(config, EventLog(directory / f"{kind}.jsonl")) as manager:
        begin = time.perf_counter()
        outcomes = manager.score([case.sample(number, outside) for case, number in cases])
        seconds = time.perf_counter() - begin
    wrong = [
        f"{case.name}: {outcome}"
        for (case, _), outcome in zip(cases, outcomes, strict=True)
        if not isinstance(outcome, Score) or outcome.value != case.score
    ]
    changes, left = list(outside.changes()), marked_processes(f"code-{kind}")
    outside.close()
    for line in [*wrong, *changes]:
        print(line, file=sys.stderr)
    longest = max(outcome.seconds for outcome in outcomes)
    row = {"kind": kind, "programs": len(cases), "seconds": seconds, "longest_s": longest}
    bench.row(**row, verdicts_wrong=len(wrong), outside_changed=len(changes), left_behind=len(left))
    bench.goal(f"{kind}: programs with the right verdict", len(cases) - len(wrong), at_least=NUM_OF_A_KIND)
    bench.goal(f"{kind}: things changed outside, files left included", len(changes), at_most=0)
    bench.goal(f"{kind}: processes left behind", len(left), at_most=0)


def measure_cost(bench: Benchmark, directory: Path) -> None:
    """Time a program that does next to nothing: two processes for printed results, one for calls."""
    (directory / "cost").mkdir()
    outside = Outside(directory / "cost")
    for name, case in {"2 processes": RIGHT[0], "1 process": RIGHT[12]}.items():
        sample, seconds = case.sample(1, outside), []
        for _ in range(REPEATS):
            begin = time.perf_counter()
            code(sample)
            seconds.append(time.perf_counter() - begin)
        bench.row(
            kind=f"{case.name}, {name}",
            programs=REPEATS,
            median_ms=1000 * statistics.median(seconds),
            fastest_ms=1000 * min(seconds),
        )
    outside.close()
    bench.goal("milliseconds of the fastest program with one process", 1000 * min(seconds), at_most=50)


def main() -> int:
    """Score every kind."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--workers", type=int, default=2)
    options = arguments.parse_args()
    bench = Benchmark("code_reward")
    with tempfile.TemporaryDirectory() as directory:
        for kind, cases in programs().items():
            measure(bench, kind, cases, options.workers, Path(directory))
        measure_cost(bench, Path(directory))
    return bench.finish(options)


if __name__ == "__main__":
    sys.exit(main())
