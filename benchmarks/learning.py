"""Each algorithm on the demo's task, from the same warmed-up model: sampled accuracy before and after.

    python benchmarks/learning.py [--seeds 1] [--steps 60] [--only NAME ...] [--besides FILE] [--json FILE]

The first six algorithms are in `mrl demo`; the others each change one part of its GRPO or PPO. The task is the sum of
two numbers from 10 to 49. Accuracy is that of answers sampled at temperature 1 to held-out problems. All algorithms use
the step sizes of PPO in `mrl demo`.

All algorithms with one seed take more than an hour. To split this, `--besides` adds the rows of an earlier run. FILE is
written after each row, so an interrupted run can be continued.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Benchmark, parser
from mrl.cli.demo import ALGORITHMS
from mrl.controller import ray_cluster
from mrl.demo.demo import DemoSettings, learn, warm_model
from mrl.demo.tasks import SUMS
from mrl.errors import MrlError
from mrl.observe.console import Console

CHANGES: dict[str, tuple[str, list[str]]] = {name: (name, []) for name in ALGORITHMS} | {
    "dr_grpo": ("grpo", ["algorithm.advantage=dr_grpo", "algorithm.loss.aggregation=seq-mean-token-sum-norm"]),
    "opo": ("grpo", ["algorithm.advantage=opo"]),
    "gpg": ("grpo", ["algorithm.advantage=gpg", "algorithm.loss.policy=gpg"]),
    "reinforce_plus_plus_baseline": ("grpo", ["algorithm.advantage=reinforce_plus_plus_baseline"]),
    "optimal_token_baseline": ("grpo", ["algorithm.advantage=optimal_token_baseline"]),
    "online_dpo": (
        "grpo",
        [
            "algorithm={advantage: online_dpo, dpo_beta: 0.1, loss: {policy: gpg, aggregation: token-sum}}",
            "batch.samples_per_update=512",
        ],
    ),
    "gspo": (
        "grpo",
        ["algorithm.loss={policy: gspo, aggregation: seq-mean-token-mean, clip_low: 3e-2, clip_high: 4e-2}"],
    ),
    "cispo": ("grpo", ["algorithm.loss={policy: cispo, clip_low: 1.0, clip_high: 4.0}"]),
    "gmpo": ("grpo", ["algorithm.loss={policy: gmpo, clip_low: 0.33, clip_high: 0.49}"]),
    "luspo": (
        "grpo",
        ["algorithm.loss={policy: gspo, aggregation: seq-mean-token-sum, clip_low: 3e-2, clip_high: 4e-2}"],
    ),
    "sapo": ("grpo", ["algorithm.loss.policy=sapo"]),
    "dppo_tv": ("grpo", ["algorithm.loss={policy: dppo_tv, clip_low: 0.15, clip_high: 0.15}"]),
    "dppo_kl": ("grpo", ["algorithm.loss={policy: dppo_kl, clip_low: 0.05, clip_high: 0.05}"]),
    "topr": ("grpo", ["algorithm.loss.policy=topr"]),
    "dro": ("grpo", ["algorithm.loss.policy=dro"]),
    "vespo": ("grpo", ["algorithm.loss.policy=vespo"]),
    "clip_cov": ("grpo", ["algorithm.loss.policy=clip_cov"]),
    "kl_cov": ("grpo", ["algorithm.loss.policy=kl_cov"]),
    "m2po": ("grpo", ["algorithm.loss.policy=m2po"]),
    "maxrl": ("grpo", ["algorithm.advantage=maxrl"]),
    "grpo_passk": ("grpo", ["algorithm.advantage=grpo_passk"]),
    "gdpo": ("grpo", ["algorithm.advantage=gdpo"]),
    "old log-probs of the engine": ("grpo", ["algorithm.old_log_probs=engine"]),
    "correction by token": ("grpo", ["algorithm.correction={level: token}"]),
    "correction by sequence": ("grpo", ["algorithm.correction={level: sequence, beyond: mask}"]),
    "KL in the reward, adaptive": ("grpo", ["algorithm.kl={where: reward, target: 0.05}"]),
    "KL in both": ("ppo", ["algorithm.kl={where: both}"]),
    "adapters of rank 8": ("grpo", ["actor.lora={rank: 8, alpha: 16}", "actor.optimizer.lr=5e-3"]),
    "overlong": ("grpo", ["algorithm.overlong={buffer_tokens: 4}"]),
}
"""Name -> the demo's algorithm, and the changes to it."""
GOAL = SUMS.goals[SUMS.solved]
MEAN = "mean"


def main() -> int:
    """Train one model of each seed with every algorithm."""
    options = parser("Each algorithm on the demo's task.")
    options.add_argument("--seeds", type=int, nargs="+", default=[1])
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--only", nargs="+", choices=CHANGES, default=list(CHANGES), metavar="NAME")
    options.add_argument("--besides", type=Path, help="results of an earlier run, whose other rows are included")
    arguments = options.parse_args()
    bench, console = Benchmark("learning"), Console(arguments.steps, quiet=True)
    measured = {(algorithm, seed) for algorithm in arguments.only for seed in arguments.seeds}
    for row in json.loads(arguments.besides.read_text())["rows"] if arguments.besides else []:
        if row["seed"] != MEAN and (row["algorithm"], row["seed"]) not in measured:
            bench.row(**row)
    with tempfile.TemporaryDirectory() as directory, ExitStack() as workplace:
        workplace.enter_context(ray_cluster(DemoSettings(Path(directory)).cluster))
        for seed in arguments.seeds:
            (seed_directory := Path(directory, str(seed))).mkdir()
            model = warm_model(DemoSettings(seed_directory, seed), console, {})
            for algorithm in arguments.only:
                bench.row(algorithm=algorithm, seed=seed, **trained(algorithm, seed, arguments.steps, model, console))
                print(bench.rows[-1], flush=True)
                bench.save(arguments)
    for algorithm in CHANGES:
        if ours := [row for row in bench.rows if row["algorithm"] == algorithm]:
            bench.row(algorithm=algorithm, seed=MEAN, **means(ours))
            seeds = "1 seed" if len(ours) == 1 else f"mean of {len(ours)} seeds"
            goal = f"{algorithm}: sampled accuracy after {arguments.steps} steps, {seeds}"
            bench.goal(goal, bench.rows[-1]["after"], at_least=GOAL)
    return bench.finish(arguments)


def trained(algorithm: str, seed: int, steps: int, model: Path, console: Console) -> dict[str, Any]:
    """Train a model, and return the accuracies and the time, or why it failed."""
    seconds: dict[str, float] = {}
    begun_from, overrides = CHANGES[algorithm]
    (directory := model.parent / algorithm).mkdir()
    settings = DemoSettings(directory, seed, begun_from, steps=steps)
    try:
        result = learn(settings, model, console, seconds, overrides)
    except MrlError as error:  # continue with the other algorithms
        return {"failed": str(error)}
    if result.after is None:
        raise SystemExit("stopped")
    return {"before": result.before, "after": result.after, "seconds": seconds[begun_from]}


def means(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean of each accuracy over the seeds, and the spread of the last one. A failure counts as 0."""
    before, after = ([row.get(name, 0.0) for row in rows] for name in ("before", "after"))
    spread = {"spread": statistics.stdev(after)} if len(rows) > 1 else {}
    return {"before": statistics.fmean(before), "after": statistics.fmean(after)} | spread


if __name__ == "__main__":
    sys.exit(main())
