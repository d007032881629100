"""`mrl demo --task preferences` over seeds, beside controls that start from the same warmed-up model and its answers.

    python benchmarks/preferences_demo.py [--seeds 1 2 3] [--steps 25] [--only NAME ...] [--json FILE]

judged:        the demo
shuffled:      the judge prefers either answer as often, so that nothing can be learned of it
gamed:         few problems, a judge who errs in 30 % of the pairs, and no KL: over-optimized on purpose
gamed with KL: by the same reward model, with KL in the reward

Accuracy is that of sampled answers to problems that are never trained on, by the rule that made the pairs: at the best
validation and at the last. Proxy is what the reward model says of them.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Benchmark, parser
from mrl.controller import ray_cluster
from mrl.demo.demo import DemoResult, DemoSettings, learn, timed, values_of, warm_model
from mrl.demo.preferences import JudgeSettings, sample_policy, train_judged
from mrl.demo.tasks import MAX_WARM_START, PREFERENCES, RIGHT_PAIRS
from mrl.observe.console import Console
from mrl.observe.metrics import read_metrics
from mrl.observe.report import OVER_OPTIMIZED, findings

MINUTES = 7.0
GAMED = JudgeSettings(errors=0.3, problems=300)
RUNS: dict[str, tuple[JudgeSettings, list[str]]] = {
    "judged": (JudgeSettings(), []),
    "shuffled": (JudgeSettings(errors=0.5), []),
    "gamed": (GAMED, ["algorithm.kl.where=none"]),
    "gamed with KL": (GAMED, ["algorithm.kl.coef=0.3"]),
}
"""Name -> how it is judged, and what is changed of the demo's configuration."""
MODEL, BEST_OF = "val/model/mean@4", "val/solved/best@4"
Rows = dict[str, dict[str, Any]]


def main() -> int:
    """One model a seed, and one set of its answers, which all of them begin with."""
    options = parser("The demo's preferences and their controls.")
    options.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    options.add_argument("--steps", type=int, default=PREFERENCES.steps)
    options.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), metavar="NAME")
    arguments = options.parse_args()
    bench = Benchmark("preferences_demo")
    with tempfile.TemporaryDirectory() as directory:
        for seed in arguments.seeds:
            rows = _runs_of(Path(directory) / str(seed), seed, arguments.steps, arguments.only)
            for name, row in rows.items():
                bench.row(**row)
                _goals(bench, f"seed {seed}, {name}", name, row)
            if {"gamed", "gamed with KL"} <= rows.keys():
                kept = rows["gamed with KL"]["last"] - rows["gamed"]["last"]
                bench.goal(f"seed {seed}: right at the last step that KL keeps", kept, at_least=0.02)
    return bench.finish(arguments)


def _runs_of(directory: Path, seed: int, steps: int, names: list[str]) -> Rows:
    directory.mkdir()
    console, rows = Console(steps, quiet=True), Rows()
    judges: dict[JudgeSettings, tuple[Path, float]] = {}
    first = DemoSettings(directory, seed, "grpo", steps=steps, task=PREFERENCES)
    with ray_cluster(first.cluster):
        begun: dict[str, float] = {}
        model = warm_model(first, console, begun)
        values = values_of(first, model)
        samples = timed(begun, "samples", lambda: sample_policy(values, directory))
        for name in names:
            judge, changes = RUNS[name]
            here = directory / name.replace(" ", "-")
            here.mkdir()
            settings, seconds = replace(first, directory=here), dict(begun)
            if judge not in judges:
                again = [*values, f"run.dir={here}"]
                judges[judge] = timed(seconds, "rm", partial(train_judged, samples, judge, again, console))
            result = learn(settings, model, console, seconds, changes, judges[judge][0])
            rows[name] = _row(name, seed, result, judges[judge][1], here / PREFERENCES.run)
            print({key: round(value, 3) if isinstance(value, float) else value for key, value in rows[name].items()})
            sys.stdout.flush()
    return rows


def _row(name: str, seed: int, result: DemoResult, accuracy: float, run: Path) -> dict[str, Any]:
    lines = read_metrics(run / "metrics.jsonl")
    validated = [line for line in lines if PREFERENCES.solved in line]
    if result.figures is None:
        raise SystemExit("stopped")
    return {
        "run": name,
        "seed": seed,
        "pairs_right": accuracy,
        "before": result.before,
        "best_of_4_before": validated[0][BEST_OF],
        "any_of_4_before": validated[0][PREFERENCES.solved.replace("mean", "pass")],
        "after": result.figures[PREFERENCES.solved],
        "at_step": result.figures["step"],
        "last": validated[-1][PREFERENCES.solved],
        "proxy_at_best": result.figures[MODEL],
        "proxy_last": validated[-1][MODEL],
        "found": [finding.title for finding in findings(lines)],
        "minutes": sum(result.seconds.values()) / 60,
    }


def _goals(bench: Benchmark, what: str, name: str, row: dict[str, Any]) -> None:
    if name == "shuffled":
        bench.goal(f"{what}: gained", row["after"] - row["before"], at_most=0.03)
    if name == "gamed":
        bench.goal(f"{what}: named by the report", float(OVER_OPTIMIZED in row["found"]), at_least=1)
    if name == "judged":
        right, pairs = (PREFERENCES.goals[figure] for figure in (PREFERENCES.solved, RIGHT_PAIRS))
        bench.goal(f"{what}: right before", row["before"], at_most=MAX_WARM_START)
        bench.goal(f"{what}: held-out pairs right", row["pairs_right"], at_least=pairs)
        bench.goal(
            f"{what}: right by the best of 4 before, above the mean", row["best_of_4_before"], at_least=row["before"]
        )
        bench.goal(f"{what}: right after", row["after"], at_least=right)
        bench.goal(f"{what}: minutes, the warm-up included", row["minutes"], at_most=MINUTES)


if __name__ == "__main__":
    sys.exit(main())
