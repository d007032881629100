"""The demo's task on a mixture with strong experts in bfloat16: without router replay, with R2 and with R3.

    python benchmarks/router_replay.py [--seeds 1 2 3 4 5] [--steps 16] [--only MODE ...] [--json FILE]

Each seed has one random mixture, whose experts are four times as strong as usual, warmed up in float32. All modes start
from it, with the same prompts. A step has 256 samples and four updates, so R2 differs from no replay from the second
update on. The mismatch is that of the engine's log-probs and the trainer's, as k3 and as the mean difference, averaged
over the steps. Accuracy is that of sampled answers to problems outside the training data, after the last step.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.harness import Benchmark, parser
from mrl.config.resolved.load import load_config_of
from mrl.controller import ray_cluster
from mrl.demo.demo import CONFIGS, DemoSettings, learn, values_of
from mrl.demo.model import MAX_LENGTH, save_toy_tokenizer
from mrl.observe.console import Console
from mrl.observe.metrics import read_metrics
from mrl.trainer.run import open_run
from mrl.trainer.sft import train_sft

MODES = ("none", "R2", "R3")
STRENGTH = 4.0
"""Factor of the experts' outputs. A token that goes to other experts then has very different log-probs."""
COLUMNS = {
    "k3": "mismatch/k3_kl",
    "difference": "mismatch/log_prob_abs_diff_mean",
    "largest difference": "mismatch/log_prob_abs_diff_max",
    "other experts": "mismatch/other_experts",
    "other experts in updates": "actor/other_experts",
    "gradient norm": "actor/grad_norm",
}
CHANGES = [
    "actor.dtype=bfloat16",
    "rollout.vllm.dtype=bfloat16",
    "batch.prompts_per_step=32",
    "batch.samples_per_update=64",
    "actor.optimizer.lr=1e-3",
    "actor.schedule.warmup_steps=8",
    "algorithm.kl.where=none",
    "sync.probe_tolerance=1.0",
]


def main() -> int:
    """Train each seed's mixture in each mode, in turns."""
    options = parser("Router replay on the demo's task.")
    options.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    options.add_argument("--steps", type=int, default=16)
    options.add_argument("--only", nargs="+", choices=MODES, default=list(MODES), metavar="MODE")
    arguments = options.parse_args()
    bench = Benchmark("router_replay")
    with tempfile.TemporaryDirectory() as directory, ray_cluster(DemoSettings(Path(directory), tp=1).cluster):
        console = Console(arguments.steps, quiet=True)
        for seed in arguments.seeds:
            model = warmed_mixture(Path(directory) / str(seed), seed, console)
            for mode in arguments.only:
                bench.row(**row_of(mode, seed, model, arguments.steps, console))
                print(bench.rows[-1], flush=True)
    for mode in arguments.only:
        ours = [row for row in bench.rows if row["mode"] == mode]
        bench.row(mode=mode, seed="mean", **means(ours))
    return bench.finish(arguments)


def warmed_mixture(directory: Path, seed: int, console: Console) -> Path:
    """Return a mixture after the demo's supervised warm-up, in float32."""
    settings = DemoSettings(directory, seed, "grpo", tp=1)
    initial = directory / "initial"
    initial.mkdir(parents=True)
    config = Qwen3MoeConfig(
        vocab_size=save_toy_tokenizer(initial),
        hidden_size=128,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=False,
        dtype="float32",
    )
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("experts.down_proj"):
                parameter *= STRENGTH
    model.save_pretrained(initial)
    with open_run(load_config_of("sft", str(CONFIGS / "sft.yaml"), values_of(settings, initial)), console) as run:
        warm = train_sft(run, lambda step, metrics: None)
    if warm is None:
        raise SystemExit("stopped")
    return warm


def row_of(mode: str, seed: int, model: Path, steps: int, console: Console) -> dict[str, Any]:
    """Train in one mode, and return its figures: means over the steps."""
    settings = DemoSettings(model.parent / mode, seed, "grpo", tp=1, steps=steps)
    settings.directory.mkdir()
    seconds: dict[str, float] = {}
    result = learn(settings, model, console, seconds, [*CHANGES, f"algorithm.router_replay={mode}"])
    if result.after is None:
        raise SystemExit("stopped")
    lines = [*read_metrics(settings.directory / settings.task.run / "metrics.jsonl")]
    figures = {
        name: statistics.fmean(found) for name, key in COLUMNS.items() if (found := [x[key] for x in lines if key in x])
    }
    row = {"mode": mode, "seed": seed, **figures, "before": result.before, "after": result.after}
    return {**row, "seconds": seconds["grpo"]}


def means(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the mean of each figure over the seeds, and the spread of the accuracy."""
    names = [name for name in rows[0] if name not in ("mode", "seed")]
    spread = statistics.stdev([row["after"] for row in rows]) if len(rows) > 1 else 0.0
    return {name: statistics.fmean(row[name] for row in rows) for name in names} | {"after, spread": spread}


if __name__ == "__main__":
    sys.exit(main())
