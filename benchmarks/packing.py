"""Distribution of rows over data-parallel ranks and micro-batches, compared with Karmarkar-Karp and the lower bound.

    python benchmarks/packing.py [--quick] [--json FILE]

The work of a row of n tokens is 24,576 n + n^2, verl's published formula for its 7B models. The peer splits the rows
over ranks by the largest differencing method, computes ceil(tokens / budget) micro-batches for each rank, uses the
largest number for all ranks, and splits each rank's rows over them by the same method, with the cheapest at both ends.
It has no budget: micro-batches above the budget are its violations.

`bound` is max(total work / ranks, work of the largest row): no plan can be faster. `makespan` is the work of the
busiest rank; `pipeline` is the end of the slowest rank when four stages share its work in one-forward-one-backward
order, with backward twice the work of forward; both are in units of the bound (of a stage's quarter of it). `shuffled`
is mrl's pipeline with micro-batches in random order. `fewest` is ceil(tokens / (ranks x budget)).
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Benchmark, interleave, parser, speedup
from benchmarks.karmarkar_karp import partition
from mrl.data.packing import PackingRules, RowCost, plan_step

Integers = npt.NDArray[np.int64]
Plan = list[list[Integers]]

COST = RowCost(linear=24576, quadratic=1)
MAX_LENGTH, MIN_LENGTH = 8192, 16
BUDGETS = (8192, 16384)
NUM_ROWS, NUM_RANKS = (512, 2048, 8192), (8, 32, 64)
NUM_STAGES = 4


def make_lengths(kind: str, count: int) -> Integers:
    """Return lengths of prompt and response together, the same in every run."""
    generator = np.random.default_rng(count)
    drawn = {
        "log-normal": generator.lognormal(7.0, 1.0, count),
        "Zipf": 64.0 * generator.zipf(1.5, count),
        "constant": np.full(count, 2048.0),
    }
    return np.clip(drawn[kind], MIN_LENGTH, MAX_LENGTH).astype(np.int64)


def plan_by_differences(lengths: Integers, num_ranks: int, budget: int) -> Plan:
    """Return the peer's plan."""
    costs = COST.of(lengths)
    shares = partition(costs, num_ranks)
    most = max(-(-int(lengths[share].sum()) // budget) for share in shares)
    return [cheapest_at_ends([share[part] for part in partition(costs[share], most)], costs) for share in shares]


def cheapest_at_ends(parts: list[Integers], costs: npt.NDArray[np.float64]) -> list[Integers]:
    """Return the order that suits a pipeline."""
    rising = sorted(parts, key=lambda part: float(costs[part].sum()))
    return rising[::2] + rising[1::2][::-1]


def pipeline_makespan(costs: Sequence[float], num_stages: int) -> float:
    """Return the end of the last task in one-forward-one-backward order, after one warm-up forward per later stage."""
    forward = [cost / 3 / num_stages for cost in costs]
    orders = [stage_order(len(costs), num_stages - 1 - stage) for stage in range(num_stages)]
    ends: dict[tuple[int, int, bool], float] = {}
    clocks, at = [0.0] * num_stages, [0] * num_stages
    while any(at[stage] < len(orders[stage]) for stage in range(num_stages)):
        for stage, order in enumerate(orders):
            while at[stage] < len(order):
                number, is_backward = order[at[stage]]
                needs = _needed(stage, number, is_backward, num_stages)
                if needs is not None and needs not in ends:
                    break
                begin = max(clocks[stage], ends[needs] if needs else 0.0)
                clocks[stage] = begin + forward[number] * (2 if is_backward else 1)
                ends[stage, number, is_backward] = clocks[stage]
                at[stage] += 1
    return max(clocks)


def stage_order(count: int, warm_up: int) -> list[tuple[int, bool]]:
    """Return the tasks of one stage: micro-batch, and whether backward."""
    warm_up = min(warm_up, count)
    steady = [task for number in range(count - warm_up) for task in ((warm_up + number, False), (number, True))]
    return [
        *((number, False) for number in range(warm_up)),
        *steady,
        *((number, True) for number in range(count - warm_up, count)),
    ]


def _needed(stage: int, number: int, is_backward: bool, num_stages: int) -> tuple[int, int, bool] | None:
    if not is_backward:
        return (stage - 1, number, False) if stage else None
    return (stage + 1, number, True) if stage < num_stages - 1 else (stage, number, False)


class Judged:
    """Quality of a plan."""

    def __init__(self, plan: Plan, lengths: Integers, budget: int) -> None:
        rows = np.sort(np.concatenate([part for parts in plan for part in parts]))
        if not np.array_equal(rows, np.arange(len(lengths))):
            raise AssertionError("the plan loses or repeats rows")
        costs = COST.of(lengths)
        bound = max(costs.sum() / len(plan), costs.max())
        work = [[float(costs[part].sum()) for part in parts] for parts in plan]
        self.violations = sum(int(lengths[part].sum()) > budget for parts in plan for part in parts)
        self.micro_batches = max(map(len, plan))
        self.makespan = float(max(map(sum, work)) / bound)
        self.pipeline = _pipeline(work, bound)
        generator = np.random.default_rng(0)
        self.shuffled = _pipeline([generator.permutation(rank).tolist() for rank in work], bound)


def _pipeline(work: list[list[float]], bound: float) -> float:
    return max(pipeline_makespan(rank, NUM_STAGES) for rank in work) / (bound / NUM_STAGES)


def measure(bench: Benchmark, lengths: Integers, names: dict[str, object], repeats: int) -> None:
    """Add one row."""
    num_ranks, budget = int(str(names["ranks"])), int(str(names["budget"]))

    def ours() -> Plan:
        return plan_step(lengths, num_ranks, budget, PackingRules(COST))

    def peer() -> Plan:
        return plan_by_differences(lengths, num_ranks, budget)

    times = interleave({"ours": ours, "kk": peer}, repeats=repeats)
    own, peers = Judged(ours(), lengths, budget), Judged(peer(), lengths, budget)
    bench.row(
        **names,
        fewest=-(-int(lengths.sum()) // (num_ranks * budget)),
        micro_batches=own.micro_batches,
        kk_micro_batches=peers.micro_batches,
        violations=own.violations,
        kk_violations=peers.violations,
        makespan=own.makespan,
        kk_makespan=peers.makespan,
        pipeline=own.pipeline,
        kk_pipeline=peers.pipeline,
        shuffled=own.shuffled,
        **times["ours"].columns("plan"),
        **times["kk"].columns("kk_plan"),
        speedup=speedup(times["ours"], times["kk"]),
    )


def set_goals(bench: Benchmark) -> None:
    """Add the goals that every row must meet."""
    rows = bench.rows
    bench.goal("micro-batches above the budget", sum(row["violations"] for row in rows), at_most=0)
    bench.goal("worst makespan over the bound", max(row["makespan"] for row in rows), at_most=1.05)
    bench.goal("worst micro-batches over the fewest", max(r["micro_batches"] / r["fewest"] for r in rows), at_most=1.05)
    bench.goal("least speedup of planning", min(row["speedup"] for row in rows), at_least=1)
    bench.goal(
        "speedup of planning, geometric mean", statistics.geometric_mean(row["speedup"] for row in rows), at_least=1
    )
    gains = [row["shuffled"] / row["pipeline"] for row in rows]
    bench.goal("pipeline, shuffled over ours, geometric mean", statistics.geometric_mean(gains), at_least=1)


def main() -> int:
    """Measure every distribution, size, number of ranks and budget."""
    arguments = parser("Packing compared with Karmarkar-Karp and the lower bound.")
    arguments.add_argument("--quick", action="store_true", help="only the smallest size")
    options = arguments.parse_args()
    bench = Benchmark("packing")
    sizes = NUM_ROWS[:1] if options.quick else NUM_ROWS
    for kind, count in product(("log-normal", "Zipf", "constant"), sizes):
        lengths = make_lengths(kind, count)
        for num_ranks, budget in product(NUM_RANKS, BUDGETS):
            names: dict[str, object] = {"lengths": kind, "rows": count, "ranks": num_ranks, "budget": budget}
            measure(bench, lengths, names, options.repeats)
    set_goals(bench)
    return bench.finish(options)


if __name__ == "__main__":
    sys.exit(main())
