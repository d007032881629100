"""Part of `gpu.py` that is a whole run: `mrl train` with an engine on the trainer's device."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_session import ON_GPU, GpuBenchmark
from mrl.demo.model import make_model, save_toy_tokenizer
from mrl.observe.metrics import read_metrics
from mrl.plan.known_models import model_values
from mrl.rounding import round_up
from mrl.verify.layout import make_random

STEPS, LIMIT_S = 3, 420.0
SECONDS = 100.0 if ON_GPU else 20.0
"""Seconds that must be left to begin a run."""
MAIN = "import sys; from mrl.cli.main import main; sys.exit(main())"
CONFIG = """\
run: {{name: run, dir: {directory}}}
cluster: {{devices_per_node: 1, device: {device}}}
placement: {{pools: {{all: 1}}, roles: {{actor: all}}}}
model: {{path: {model}}}
algorithm: {{advantage: grpo, kl: {{where: loss}}}}
batch: {{prompts_per_step: {prompts}, samples_per_prompt: 8, samples_per_update: {samples}}}
actor: {{dtype: {dtype}, max_tokens_per_device: {tokens}, optimizer: {{lr: 1e-6}}}}
rollout: {{max_prompt_tokens: 32, max_response_tokens: {longest}, vllm: {vllm}}}
sync: {{probe_every: 1}}
data: {{train: {{sums: {{dataset: "toy:addition"}}}}}}
reward: {{functions: {{short: {{name: length, options: {{target_tokens: 1, max_tokens: {longest}}}}}}}, num_workers: 1}}
training: {{steps: {steps}, save_every: 2}}
"""
GPU = {"device": "gpu", "prompts": 32, "samples": 256, "dtype": "bfloat16", "tokens": 32_768, "longest": 512}
CPU = {"device": "cpu", "prompts": 2, "samples": 16, "dtype": "float32", "tokens": 512, "longest": 16}
GPU_ENGINES = {
    # starts much faster
    "plain launches": "{gpu_memory_utilization: 0.7, enforce_eager: true, enable_flashinfer_autotune: false}",
    "compiled, CUDA graphs": "{gpu_memory_utilization: 0.7}",
}
CPU_ENGINES = {"plain launches": "{enforce_eager: true, kv_cache_memory_bytes: 67108864}"}
SHOWN = (
    *("timing_s/step", "timing_s/rollout", "timing_s/update_actor", "sync/seconds", "perf/generated_per_s"),
    *("perf/actor_mfu", "actor/rollout_diff", "actor/loss"),
)


def run_model(directory: Path) -> Path:
    """Make a random model of 0.5 billion parameters for the toy tokenizer, or on the CPU the demo's model."""
    if not ON_GPU:
        return make_model(directory / "model", seed=1)
    # transformers loads it as a Qwen2 tokenizer and adds one token to the saved ones.
    vocab = round_up(save_toy_tokenizer(directory / "model") + 1, 64)
    values = {**model_values("Qwen2.5-0.5B"), "vocab_size": vocab}
    return make_random(values, "lm", directory / "model", torch.bfloat16)


def whole_run(bench: GpuBenchmark, directory: Path) -> None:
    """Run three steps of GRPO: engines start, sleep, wake, receive weights and are compared with the trainer."""
    for module in ("vllm", "ray"):
        if importlib.util.find_spec(module) is None:
            bench.row(what="three steps of GRPO", skipped=f"{module} is not here")
            return
    model = run_model(directory)
    for kernels, engine in (GPU_ENGINES if ON_GPU else CPU_ENGINES).items():
        with bench.attempt(kernels):
            if bench.has_time(SECONDS, f"three steps of GRPO, {kernels}"):
                _run(bench, directory / kernels.partition(",")[0], model, kernels, engine)


def _run(bench: GpuBenchmark, directory: Path, model: Path, kernels: str, engine: str) -> None:
    settings: dict[str, Any] = GPU if ON_GPU else CPU
    directory.mkdir()
    config = directory / "run.yaml"
    config.write_text(CONFIG.format(**settings, directory=directory, model=model, steps=STEPS, vllm=engine))
    began = time.perf_counter()
    output = directory / "output"
    with output.open("wb") as file:
        command = [sys.executable, "-c", MAIN, "train", str(config)]
        try:
            status = subprocess.run(
                command, stdout=file, stderr=file, timeout=max(1.0, min(LIMIT_S, bench.seconds_left))
            ).returncode
        finally:
            print("\n".join(output.read_text(errors="replace").splitlines()[-40:]), flush=True)
    lines = read_metrics(directory / "run" / "metrics.jsonl") if status == 0 else []
    for line in lines:
        bench.row(what=f"step {line['step']}, {kernels}", **{name: line[name] for name in SHOWN if name in line})
    bench.row(what=f"the whole run, {kernels}", seconds=time.perf_counter() - began)
    goal = f"steps of GRPO, each with synced weights proven and log-probs compared, {kernels}"
    bench.goal(goal, len(lines), at_least=STEPS)
