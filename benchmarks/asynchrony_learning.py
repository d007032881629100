"""Samples needed to learn the demo's task from batches drawn ahead, with and without correction.

    python benchmarks/asynchrony_learning.py [--seeds N ...] [--steps 40] [--besides FILE] [--json FILE]

It runs the GRPO of `mrl demo`, with an engine on a separate device, from the same warmed-up model for each seed.
Accuracy is measured every four steps, on answers sampled at temperature 1 to held-out problems; the number of samples
to 80 % is interpolated. "Not corrected" means a correction with all weights set to 1.

All seeds together take more than an hour. To split this, `--besides` adds the seeds of an earlier run.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Benchmark, parser
from mrl.config.schema import ClusterConfig
from mrl.controller import ray_cluster
from mrl.demo.demo import DemoSettings, learn, warm_model
from mrl.demo.tasks import SUMS
from mrl.observe.console import Console
from mrl.observe.metrics import read_metrics

EVERY = 4
APART = (
    "cluster.devices_per_node=2",
    "placement={pools: {laptop: 1, engines: 1}, roles: {rollout: engines}}",
    f"validation.every={EVERY}",
)
WITH, WITHOUT = "algorithm.correction={level: token}", "algorithm.correction={level: token, upper: 1.0, lower: 1.0}"
BETWEEN, IN_FLIGHT = "asynchrony.ahead=1", "asynchrony={ahead: 2, weights: in_flight}"
MODES: dict[str, tuple[str, ...]] = {
    "ahead 0": (),
    "ahead 1, corrected": (BETWEEN, WITH),
    "ahead 1, not corrected": (BETWEEN, WITHOUT),
    "ahead 2 in flight, corrected": (IN_FLIGHT, WITH),
    "ahead 2 in flight, not corrected": (IN_FLIGHT, WITHOUT),
}
GOAL = SUMS.goals[SUMS.solved]


def samples_to_goal(run: Path) -> float | None:
    """Return the number of trained samples when the accuracy reached the goal; None if it never did."""
    previous: tuple[float, float] = 0.0, 0.0
    for line in read_metrics(run / "metrics.jsonl"):
        if SUMS.solved in line:
            current = float(line["step"]), float(line[SUMS.solved])
            if current[1] >= GOAL:
                share = (GOAL - previous[1]) / (current[1] - previous[1])
                return (previous[0] + share * (current[0] - previous[0])) * SUMS.samples_per_step
            previous = current
    return None


def main() -> int:
    """Create one model per seed, and train it in every mode."""
    options = parser("Samples to 80 % of the demo's task, by how far generation is ahead.")
    options.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    options.add_argument("--steps", type=int, default=40)
    options.add_argument("--besides", type=Path, help="results of an earlier run, whose other seeds are included")
    arguments = options.parse_args()
    bench, console = Benchmark("asynchrony_learning"), Console(arguments.steps, quiet=True)
    earlier = json.loads(arguments.besides.read_text())["rows"] if arguments.besides else []
    for row in earlier:
        if "seed" in row and row["seed"] not in arguments.seeds:
            bench.row(**row)
    with tempfile.TemporaryDirectory() as directory, ExitStack() as workplace:
        workplace.enter_context(ray_cluster(ClusterConfig(devices_per_node=2, device="cpu")))
        for seed in arguments.seeds:
            seed_directory = Path(directory, str(seed))
            seed_directory.mkdir()
            model = warm_model(DemoSettings(seed_directory, seed, "grpo", tp=1), console, {})
            for number, (mode, overrides) in enumerate(MODES.items()):
                (mode_directory := seed_directory / str(number)).mkdir()
                settings = DemoSettings(mode_directory, seed, "grpo", tp=1, steps=arguments.steps)
                result = learn(settings, model, console, {}, (*APART, *overrides))
                samples = samples_to_goal(mode_directory / SUMS.run)
                bench.row(seed=seed, mode=mode, before=result.before, after=result.after, samples_to_goal=samples)
                print(seed, mode, result.after, samples, flush=True)
    num_seeds = len({row["seed"] for row in bench.rows})
    samples_by_mode = {mode: [row["samples_to_goal"] for row in bench.rows if row["mode"] == mode] for mode in MODES}
    for mode, mode_samples in samples_by_mode.items():
        samples_of = [samples for samples in mode_samples if samples is not None]
        bench.goal(f"{mode}: seeds that reached {100 * GOAL:.0f} %", len(samples_of), at_least=num_seeds)
        if samples_of:
            low, median, high = min(samples_of), statistics.median(samples_of), max(samples_of)
            bench.row(mode=mode, least=low, median=median, most=high)
    return bench.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())
