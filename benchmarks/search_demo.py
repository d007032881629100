"""`mrl demo --task search` for several seeds, with two controls that start from the same warmed-up model.

    python benchmarks/search_demo.py [--seeds 1 2 3] [--steps 50] [--only NAME ...] [--json FILE]

silent:   the retriever finds nothing, so that correct answers are only possible by chance no mask:  the environment's
answers are trained on as if the model had written them

Accuracy is that of sampled answers to questions about held-out keys. Searches are those of the last five steps. A
conversation needs as many searches as its question has hops, 1.5 on average.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Benchmark, parser
from benchmarks.search_controls import without_mask
from mrl.controller import ray_cluster
from mrl.demo.demo import DemoResult, DemoSettings, learn, warm_model
from mrl.demo.facts import HOPS
from mrl.demo.tasks import MAX_WARM_START, SEARCH
from mrl.observe.console import Console
from mrl.observe.metrics import read_metrics

MINUTES = 6.0
LAST = 5
CHANGES: dict[str, list[str]] = {
    "search": [],
    "silent": ["agent.environments.facts.name=benchmarks.search_controls:SilentSearch"],
    "no mask": ["sync.probe_every=0"],  # the engine has no log-probs of the environment's tokens
}
"""Name -> changes to the demo's configuration."""


def main() -> int:
    """Create one model per seed, as the start of all runs."""
    options = parser("The demo's search task and its controls.")
    options.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    options.add_argument("--steps", type=int, default=SEARCH.steps)
    options.add_argument("--only", nargs="+", choices=CHANGES, default=list(CHANGES), metavar="NAME")
    arguments = options.parse_args()
    bench = Benchmark("search_demo")
    with tempfile.TemporaryDirectory() as directory:
        for seed in arguments.seeds:
            rows = _runs_of(Path(directory) / str(seed), seed, arguments.steps, arguments.only)
            for name, row in rows.items():
                bench.row(**row)
                _goals(bench, f"seed {seed}, {name}", name, row)
            if {"search", "no mask"} <= rows.keys():
                lost = rows["search"]["mean_score"] - rows["no mask"]["mean_score"]
                bench.goal(f"seed {seed}: mean score of the steps that the mask is worth", lost, at_least=0.02)
    return bench.finish(arguments)


def _runs_of(directory: Path, seed: int, steps: int, names: list[str]) -> dict[str, dict[str, Any]]:
    directory.mkdir()
    console, rows = Console(steps, quiet=True), {}
    first = DemoSettings(directory, seed, "grpo", steps=steps, task=SEARCH)
    with ray_cluster(first.cluster):
        warm_up: dict[str, float] = {}
        model = warm_model(first, console, warm_up)
        for name in names:
            run_directory = directory / name.replace(" ", "-")
            run_directory.mkdir()
            settings = DemoSettings(run_directory, seed, "grpo", steps=steps, task=SEARCH)
            with without_mask() if name == "no mask" else nullcontext():
                result = learn(settings, model, console, dict(warm_up), CHANGES[name])
            rows[name] = _row(name, seed, result, run_directory / SEARCH.run)
            print({key: round(value, 3) if isinstance(value, float) else value for key, value in rows[name].items()})
            sys.stdout.flush()
    return rows


def _row(name: str, seed: int, result: DemoResult, run: Path) -> dict[str, Any]:
    if result.figures is None:
        raise SystemExit("stopped")
    step_lines = [line for line in read_metrics(run / "metrics.jsonl") if "agent/calls/mean" in line]
    searches = {
        f"searches_{source}": fmean(line[f"reward/{source}/facts/searches/mean"] for line in step_lines[-LAST:])
        for source in HOPS
    }
    return {
        "run": name,
        "seed": seed,
        "before": result.before,
        "after": result.figures[SEARCH.solved],
        **{source: result.figures[SEARCH.solved.replace("val/", f"val/{source}/")] for source in HOPS},
        "searches": fmean(searches.values()),
        **searches,
        "mean_score": fmean(line["critic/score/mean"] for line in step_lines),
        "mismatch": max(line["mismatch/log_prob_abs_diff_mean"] for line in step_lines),
        "minutes": sum(result.seconds.values()) / 60,
    }


def _goals(bench: Benchmark, prefix: str, name: str, row: dict[str, Any]) -> None:
    if name == "silent":
        bench.goal(f"{prefix}: right after", row["after"], at_most=0.05)
    if name != "search":
        return
    right, two_hops = SEARCH.goals.values()
    bench.goal(f"{prefix}: right before", row["before"], at_most=MAX_WARM_START)
    bench.goal(f"{prefix}: right after", row["after"], at_least=right)
    bench.goal(f"{prefix}: right after two hops", row["two_hops"], at_least=two_hops)
    bench.goal(f"{prefix}: searches missing or too many, of 1.5", abs(row["searches"] - 1.5), at_most=0.1)
    bench.goal(f"{prefix}: minutes, the warm-up included", row["minutes"], at_most=MINUTES)


if __name__ == "__main__":
    sys.exit(main())
