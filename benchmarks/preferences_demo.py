"""`mrl demo --task preferences` for several seeds, with controls that start from the same warmed-up model and its
answers.

    python benchmarks/preferences_demo.py [--seeds 1 2 3] [--steps 25] [--only NAME ...] [--json FILE]

judged:        the demo shuffled:      the judge prefers either answer equally often, so that there is nothing to learn
gamed:         few problems, a judge that is wrong in 30 % of the pairs, and no KL: over-optimized on purpose gamed with
KL: the same reward model, with KL in the reward dpo:           the demo's pairs without a reward model: `mrl dpo` on
the warmed-up model

Accuracy is that of sampled answers to held-out problems, by the rule that created the pairs, at the best and at the
last validation. Proxy is the reward model's score of them.
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
from mrl.config.resolved.load import load_config, load_config_of
from mrl.controller import ray_cluster
from mrl.demo.demo import CONFIGS, DemoResult, DemoSettings, learn, timed, values_of, warm_model
from mrl.demo.preferences import sample_policy, train_judged
from mrl.demo.tasks import MAX_WARM_START, PREFERENCES, RIGHT_PAIRS
from mrl.events import EventLog
from mrl.observe.console import Console
from mrl.observe.health import OVER_OPTIMIZED, findings
from mrl.observe.metrics import read_metrics
from mrl.trainer.evaluation import evaluate
from mrl.trainer.run import open_run
from mrl.trainer.sft import train_sft

MINUTES = 7.0
Judge = tuple[float, int | None]
"""Share of pairs in the wrong order, and number of problems whose answers the judge sees; None for all problems."""
GAMED: Judge = (0.3, 300)
RUNS: dict[str, tuple[Judge, list[str]]] = {
    "judged": ((0.0, None), []),
    "shuffled": ((0.5, None), []),
    "gamed": (GAMED, ["algorithm.kl.where=none"]),
    "gamed with KL": (GAMED, ["algorithm.kl.coef=0.3"]),
}
"""Name -> the judge, and the changes to the demo's configuration."""
DPO = """\
run: {name: dpo}
cluster: {device: cpu}
placement: {roles: {actor: laptop}}
data:
  max_bad_rows: 100
  train:
    pairs: {dataset: "mrl.demo.preferences:policy_pairs", options: {part: train}, columns: {ability: null}}
  validation:
    pairs: {dataset: "mrl.demo.preferences:policy_pairs", options: {part: validation}, columns: {ability: null}}
batch: {rows_per_update: 64, max_prompt_tokens: 16, max_response_tokens: 25}
preference: {loss: sigmoid, beta: 0.1, sft_weight: 0.5}
actor:
  dtype: float32
  max_tokens_per_device: 4096
  optimizer: {lr: 5e-4, weight_decay: 0.0}
  schedule: {warmup_steps: 20, decay: linear, decay_steps: 300, min_lr_ratio: 0.1}
training: {steps: 300}
validation: {every: 100}
"""
MODEL, BEST_OF = "val/model/mean@4", "val/solved/best@4"
Rows = dict[str, dict[str, Any]]


def main() -> int:
    """Create one model and one set of its answers per seed, as the start of all runs."""
    options = parser("The demo's preferences and their controls.")
    options.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    options.add_argument("--steps", type=int, default=PREFERENCES.steps)
    options.add_argument("--only", nargs="+", choices=[*RUNS, "dpo"], default=[*RUNS, "dpo"], metavar="NAME")
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
    judges: dict[Judge, tuple[Path, float]] = {}
    first = DemoSettings(directory, seed, "grpo", steps=steps, task=PREFERENCES)
    with ray_cluster(first.cluster):
        start_seconds: dict[str, float] = {}
        model = warm_model(first, console, start_seconds)
        values = values_of(first, model)
        samples = timed(start_seconds, "samples", lambda: sample_policy(values, directory))
        if "dpo" in names:
            rows["dpo"] = _by_pairs(seed, values, samples, directory, console)
        for name in [name for name in names if name in RUNS]:
            judge, changes = RUNS[name]
            run_directory = directory / name.replace(" ", "-")
            run_directory.mkdir()
            settings, seconds = replace(first, directory=run_directory), dict(start_seconds)
            if judge not in judges:
                overrides = [*values, f"run.dir={run_directory}"]
                judges[judge] = timed(seconds, "rm", partial(train_judged, samples, overrides, console, *judge))
            result = learn(settings, model, console, seconds, changes, judges[judge][0])
            rows[name] = _row(name, seed, result, judges[judge][1], run_directory / PREFERENCES.run)
            _show(rows[name])
    return rows


def _by_pairs(seed: int, values: list[str], samples: Path, directory: Path, console: Console) -> dict[str, Any]:
    """Train by DPO on the demo's pairs. Accuracy before and after is that of sampled answers."""
    config, run_directory = directory / "dpo.yaml", directory / "by-pairs"
    config.write_text(DPO)
    (run_directory / "logs").mkdir(parents=True)
    overrides = [f"data.{part}.pairs.options.samples={samples}" for part in ("train", "validation")]
    with open_run(load_config_of("dpo", str(config), [*values, *overrides]), console) as run:
        model = train_sft(run, lambda step, metrics: None)
        last = read_metrics(run.directory / "metrics.jsonl")[-1]
    assert model is not None, "the run was not stopped"
    before, after = (_right(values, path, run_directory) for path in (None, model))
    row = {"run": "dpo", "seed": seed, "pairs_right": last["val/accuracy"], "before": before, "after": after}
    _show(row)
    return row


def _right(values: list[str], model: Path | None, here: Path) -> float:
    """Return the share of correct answers that a model samples on the validation problems."""
    overrides = ["run.name=measured", "training.steps=1", "actor.schedule.decay=constant", "reward_model=null"]
    overrides += ["placement.roles.reward_model=null", "reward.functions.answer.name=digits"]
    overrides += ["validation.best_metric=null", *([] if model is None else [f"model.path={model}"])]
    config = load_config(str(CONFIGS / "preferences.yaml"), [*values, *overrides]).config
    events = EventLog(here / "events.jsonl")
    try:
        (figures,) = evaluate(config, [config.validation], here, events, lambda text: None)
    finally:
        events.close()
    return figures[PREFERENCES.solved]


def _show(row: dict[str, Any]) -> None:
    print({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}, flush=True)


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


def _goals(bench: Benchmark, prefix: str, name: str, row: dict[str, Any]) -> None:
    if name == "shuffled":
        bench.goal(f"{prefix}: gained", row["after"] - row["before"], at_most=0.03)
    if name == "gamed":
        bench.goal(f"{prefix}: named by the report", float(OVER_OPTIMIZED in row["found"]), at_least=1)
    if name == "dpo":
        bench.goal(f"{prefix}: right after", row["after"], at_least=PREFERENCES.goals[PREFERENCES.solved])
    if name == "judged":
        right, pairs = (PREFERENCES.goals[figure] for figure in (PREFERENCES.solved, RIGHT_PAIRS))
        bench.goal(f"{prefix}: right before", row["before"], at_most=MAX_WARM_START)
        bench.goal(f"{prefix}: held-out pairs right", row["pairs_right"], at_least=pairs)
        bench.goal(
            f"{prefix}: right by the best of 4 before, above the mean", row["best_of_4_before"], at_least=row["before"]
        )
        bench.goal(f"{prefix}: right after", row["after"], at_least=right)
        bench.goal(f"{prefix}: minutes, the warm-up included", row["minutes"], at_most=MINUTES)


if __name__ == "__main__":
    sys.exit(main())
