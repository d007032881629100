"""Log-probs of engines in bfloat16 and in FP8 against a trainer in bfloat16, with the figures of the correction.

    python benchmarks/fp8_mismatch.py [--seeds 1 2 3] [--prompts 64] [--json FILE]

Each seed warms the demo's model up. No CPU has vLLM's kernels for blocks, so `fp8_per_block` is emulated: an engine in
bfloat16 computes with the weights that blocks of 128 x 128 in FP8 stand for. Its activations stay in bfloat16, so a
real engine differs by more. `fp8_per_channel` is vLLM's own engine. The trainer is transformers in bfloat16 with the
unquantized weights. Weights of the correction are cut at 2.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.harness import Benchmark, parser
from mrl.algos.rollout_correction import RolloutPair, correction_metrics, mismatch_metrics
from mrl.algos.rows import Rows
from mrl.config.algorithm import CorrectionConfig
from mrl.controller import ray_cluster
from mrl.demo.demo import DemoSettings, warm_model
from mrl.models.families import read_spec
from mrl.observe.console import Console
from mrl.rollout.engine import EngineSettings, engine_class
from mrl.rollout.requests import Generated, GenerationRequest, Sampling, request_seed
from mrl.weight_sync.fp8 import block_scales

VOCAB_LIMIT, NEW_TOKENS = 64, 8
SAMPLES = 8
"""Samples of each prompt."""


def main() -> int:
    """Sample from each engine, and score with the trainer."""
    options = parser("The mismatch of engines in FP8.")
    options.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    options.add_argument("--prompts", type=int, default=64)
    arguments = options.parse_args()
    bench = Benchmark("fp8_mismatch")
    with tempfile.TemporaryDirectory() as directory, ray_cluster(DemoSettings(Path(directory), tp=1).cluster):
        for seed in arguments.seeds:
            place = Path(directory, str(seed))
            model = warm_model(DemoSettings(place, seed, "grpo", tp=1), Console(1, quiet=True), {})
            quantized = dequantized_copy(model, place / "dequantized")
            for name, path, vllm in (
                ("bfloat16", model, {}),
                ("blocks, emulated", quantized, {}),
                ("fp8_per_channel", model, {"quantization": "fp8_per_channel"}),
            ):
                row = {"engine": name, "seed": seed, **measured(path, model, vllm, seed, arguments.prompts)}
                bench.row(**row)
                print(row, flush=True)
    for name in dict.fromkeys(row["engine"] for row in bench.rows):
        ours = [row for row in bench.rows if row["engine"] == name]
        figures = [key for key in ours[0] if key not in ("engine", "seed")]
        bench.row(engine=name, seed="mean", **{key: statistics.fmean(row[key] for row in ours) for key in figures})
    return bench.finish(arguments)


def dequantized_copy(model: Path, target: Path) -> Path:
    """Return a copy of a model whose linear layers are what vLLM's blocks stand for, fused as in an engine."""
    shutil.copytree(model, target)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(model / "model.safetensors").items()}
    for name in [name for name in tensors if name.endswith("q_proj.weight")]:
        prefix = name.removesuffix("self_attn.q_proj.weight")
        for module, parts in (("self_attn", "q k v"), ("self_attn", "o"), ("mlp", "gate up"), ("mlp", "down")):
            requantize(tensors, [f"{prefix}{module}.{part}_proj.weight" for part in parts.split()])
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def requantize(tensors: dict[str, Tensor], names: list[str]) -> None:
    """Replace tensors, one below another, by the values of their blocks."""
    fused_RC = torch.cat([tensors[name] for name in names])
    scale_RC = block_scales(fused_RC).repeat_interleave(128, 0).repeat_interleave(128, 1)
    stands_for = ((fused_RC * (1.0 / scale_RC)).to(torch.float8_e4m3fn).float() * scale_RC).bfloat16()
    for name, part in zip(names, torch.split(stands_for, [len(tensors[name]) for name in names]), strict=True):
        tensors[name] = part.contiguous()


def measured(path: Path, trained: Path, vllm: Mapping[str, Any], seed: int, num_prompts: int) -> dict[str, float]:
    """Return the figures of one engine's samples."""
    noise = np.random.default_rng(seed)
    sums = noise.integers(10, 50, (num_prompts, 2))
    prompts = {f"{a}+{b}": prompt_ids(trained, f"{a}+{b}=") for a, b in sums}
    requests = [
        GenerationRequest(f"{prompt}/{number}", prompt, ids, request_seed(seed, 0, prompt, number), NEW_TOKENS)
        for prompt, ids in prompts.items()
        for number in range(SAMPLES)
    ]
    with tempfile.TemporaryDirectory() as sockets:
        options = {"enforce_eager": True, "kv_cache_memory_bytes": 64 << 20, **vllm}
        vocab = read_spec(str(trained)).vocab
        settings = EngineSettings(path, "bfloat16", "cpu", VOCAB_LIMIT, vocab, Path(sockets), "r", 1, options)
        engine = engine_class("vllm")(replace(settings, loads_files=True))
        engine.receive_weights(1)  # those of the files
        engine.start(requests, Sampling(temperature=1.0))
        samples: list[Generated] = []
        while engine.unfinished:
            samples += engine.step()
        engine.close()
    by_key = {request.key: request for request in requests}
    trainer_T = torch.cat([log_probs(trained, by_key[sample.key].prompt_ids, sample.token_ids) for sample in samples])
    engine_T = torch.from_numpy(np.concatenate([sample.log_probs for sample in samples]))
    rows = Rows.of([len(sample.token_ids) for sample in samples])
    pair = RolloutPair(rows, torch.ones_like(trainer_T, dtype=torch.bool), trainer_T, engine_T)
    found = {**mismatch_metrics(pair), **correction_metrics(pair, CorrectionConfig(upper=2.0))}
    return {
        "difference": found["log_prob_abs_diff_mean"],
        "largest difference": found["log_prob_abs_diff_max"],
        "k3": found["k3_kl"],
        "effective samples": found["rollout_is_eff_sample_size"],
        "cut": found["rollout_is_ratio_fraction_high"],
    }


def prompt_ids(model: Path, text: str) -> np.ndarray[Any, np.dtype[np.int32]]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
    )
    return np.asarray(ids, np.int32)


@cache
def trainer(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()


@torch.no_grad()
def log_probs(model: Path, prompt: Any, response: Any) -> Tensor:
    """Return the trainer's log-probs of a response."""
    ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
    logits_TV = trainer(model)(ids.unsqueeze(0)).logits[0, len(prompt) - 1 : -1].float()
    found_T: Tensor = logits_TV.log_softmax(-1).gather(1, ids[len(prompt) :].unsqueeze(1)).squeeze(1)
    return found_T


if __name__ == "__main__":
    sys.exit(main())
