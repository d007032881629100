"""Each algorithm on the demo's task, from the same warmed-up model: sampled accuracy before and after.

    python benchmarks/learning.py [--seed 1] [--steps 60] [--only NAME ...] [--json FILE]

The first six algorithms are in `mrl demo`; the others each change one part of its GRPO or PPO. The task is the sum of
two numbers from 10 to 49. Accuracy is that of answers sampled at temperature 1 to held-out problems. All algorithms use
the step sizes of PPO in `mrl demo`.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

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


def main() -> int:
    """Train one model with every algorithm."""
    options = parser("Each algorithm on the demo's task.")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--only", nargs="+", choices=CHANGES, default=list(CHANGES), metavar="NAME")
    arguments = options.parse_args()
    bench = Benchmark("learning")
    with tempfile.TemporaryDirectory() as directory, ExitStack() as workplace:
        run_directory, console = Path(directory), Console(arguments.steps, quiet=True)
        first = DemoSettings(run_directory, arguments.seed)
        workplace.enter_context(ray_cluster(first.cluster))
        model = warm_model(first, console, {})
        for algorithm in arguments.only:
            seconds: dict[str, float] = {}
            begun_from, overrides = CHANGES[algorithm]
            (run_directory / algorithm).mkdir()
            settings = DemoSettings(run_directory / algorithm, arguments.seed, begun_from, steps=arguments.steps)
            goal = f"{algorithm}: sampled accuracy after {arguments.steps} steps"
            try:
                result = learn(settings, model, console, seconds, overrides)
            except MrlError as error:  # continue with the other algorithms
                bench.row(algorithm=algorithm, failed=str(error))
                bench.goal(goal, 0.0, at_least=GOAL)
                continue
            if result.after is None:
                raise SystemExit("stopped")
            row = {"before": result.before, "after": result.after, "seconds": seconds[begun_from]}
            print(algorithm, {name: round(value, 3) for name, value in row.items()}, flush=True)
            bench.row(algorithm=algorithm, **row)
            bench.goal(goal, result.after, at_least=GOAL)
    return bench.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())
