"""Time saved by generating ahead if the longest response has five times the mean length: seconds for equal samples.

    python benchmarks/asynchrony.py [--steps N] [--repeats N] [--epochs N] [--json FILE]

Whole `mrl train` runs alternate, each with one engine and one trainer process, on one core each: synchronous, one batch
ahead between batches, and two ahead in flight. In addition, a synchronous run has a trainer and an engine on each of
the two cores. Lengths are log-normal with mean 64 and at most 320 tokens: vLLM ends each sample at a length drawn from
its seed. All passes count: the synchronous runs have no correction and therefore compute no old log-probs, but the
others do. Seconds come from metrics.jsonl, without the first two steps; `idle` is the median share of the step.
`--epochs` makes training longer.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Benchmark, parser
from benchmarks.killed_runs import MAIN, ROOT
from mrl.demo.model import make_model
from mrl.observe.metrics import read_metrics
from mrl.rollout.requests import GenerationRequest, Sampling

MEAN_TOKENS, MAX_TOKENS, SIGMA = 64, 320, 1.0
SETTLING_STEPS, LIMIT_S = 2, 400.0
APART = ("{trainer: 1, engines: 1}", "{actor: trainer, rollout: engines}")
TOGETHER = ("{both: 2}", "{actor: both}")
CORRECTION = "algorithm.correction={level: token}"
MODES: dict[str, tuple[tuple[str, str], tuple[str, ...]]] = {
    "synchronous, apart": (APART, ()),
    "ahead 1, between": (APART, (CORRECTION, "asynchrony.ahead=1")),
    "ahead 2, in flight": (APART, (CORRECTION, "asynchrony={ahead: 2, weights: in_flight}")),
    "synchronous, together": (TOGETHER, ()),
}
GOAL = 1.6
CONFIG = """\
run: {{name: none, dir: {directory}}}
cluster: {{devices_per_node: 2, device: cpu}}
placement: {{pools: {pools}, roles: {roles}}}
model: {{path: {directory}/model}}
algorithm: {{advantage: grpo}}
batch: {{prompts_per_step: 16, samples_per_prompt: 4, samples_per_update: 64, epochs_per_step: {epochs}}}
actor: {{dtype: float32, max_tokens_per_device: 2048, optimizer: {{lr: 1e-5}}}}
rollout:
  engine: "benchmarks.asynchrony:lengths_given"
  max_prompt_tokens: 16
  max_response_tokens: {longest}
  vllm: {{enforce_eager: true, kv_cache_memory_bytes: 268435456}}
data: {{train: {{sums: {{dataset: "toy:addition"}}}}}}
reward: {{functions: {{right: {{name: digits}}}}, num_workers: 1}}
sync: {{probe_every: 0}}
training: {{steps: {steps}, save_every: 0, samples_every: 0}}
"""


def length_of(seed: int) -> int:
    """Return the number of tokens in a sample's response, which depends on its seed."""
    drawn = np.random.default_rng(seed).lognormal(np.log(MEAN_TOKENS) - SIGMA**2 / 2, SIGMA)
    return int(np.clip(drawn, 1, MAX_TOKENS))


def cut(requests: Sequence[GenerationRequest], sampling: Sampling) -> tuple[list[GenerationRequest], Sampling]:
    """Return requests that end each sample at its length, and nowhere else."""
    ended = [replace(request, max_tokens=length_of(request.seed)) for request in requests]
    return ended, replace(sampling, stop_token_ids=())


def __getattr__(name: str) -> object:
    """Create the engine class on demand: this process needs no vLLM."""
    if name != "lengths_given":
        raise AttributeError(name)
    from mrl.rollout.vllm_engine import VllmEngine

    class LengthsGiven(VllmEngine):
        """Ends each sample at its own length, and nowhere else."""

        def _start(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> None:
            super()._start(*cut(requests, sampling))

    return LengthsGiven


def run(config: Path, name: str, overrides: Sequence[str]) -> list[dict[str, float]]:
    """Return the metrics of the steps that count."""
    command = [sys.executable, "-c", MAIN, "train", str(config), f"run.name={name}", *overrides]
    subprocess.run(command, cwd=ROOT, check=True, timeout=LIMIT_S, stdout=subprocess.DEVNULL)
    return list(read_metrics(config.parent / name / "metrics.jsonl"))[SETTLING_STEPS:]


def main() -> int:
    """Run all modes in turns."""
    options = parser("Time saved by generating ahead.")
    options.add_argument("--steps", type=int, default=12)
    options.add_argument("--epochs", type=int, default=2)
    arguments = options.parse_args()
    bench = Benchmark("asynchrony")
    lines_by_mode: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory, "run.yaml")
        make_model(Path(directory, "model"), seed=1, max_length=MAX_TOKENS + 16)
        settings = {"directory": directory, "epochs": arguments.epochs, "steps": arguments.steps, "longest": MAX_TOKENS}
        for repeat in range(arguments.repeats):
            for number, (mode, ((pools, roles), overrides)) in enumerate(MODES.items()):
                config.write_text(CONFIG.format(**settings, pools=pools, roles=roles))
                lines_by_mode[mode] += run(config, f"run-{repeat}-{number}", overrides)
                print(
                    mode,
                    f"{statistics.median(line['timing_s/step'] for line in lines_by_mode[mode]):.2f} s a step",
                    flush=True,
                )
    seconds = {
        mode: statistics.median(line["timing_s/step"] for line in lines) for mode, lines in lines_by_mode.items()
    }
    for mode, lines in lines_by_mode.items():
        values = {name: [line[name] for line in lines if name in line] for name in lines[0]}
        idle = {side: values.get(f"perf/{side}_idle_share") for side in ("trainer", "engines")}
        bench.row(
            mode=mode,
            step_s=seconds[mode],
            spread_s=float(np.subtract(*np.percentile(values["timing_s/step"], [75, 25]))),
            samples_per_s=64 / seconds[mode],
            over_synchronous=seconds["synchronous, apart"] / seconds[mode],
            trained_tokens=statistics.mean(values["response_length/mean"]),
            longest=max(values["response_length/max"]),
            **{f"{side}_idle": statistics.median(shares) for side, shares in idle.items() if shares},
        )
    best = max(seconds["synchronous, apart"] / seconds[mode] for mode in list(MODES)[1:3])
    bench.goal("samples per second over synchronous in the same placement", best, at_least=GOAL)
    return bench.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())
