"""Parts of `gpu.py` that train one model: parity, and speed with each set of kernels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_session import DEVICE, ON_GPU, GpuBenchmark, matrix_rate, once, timed
from benchmarks.harness import Timing
from mrl.config.hardware import device_flops_per_s
from mrl.config.schema import ParallelConfig, TrainedModelConfig
from mrl.libraries import transformer_engine_extension
from mrl.models.families import read_spec
from mrl.models.megatron_arguments import fused_kernels
from mrl.models.small import small_config
from mrl.plan.known_models import model_values
from mrl.verify.layout import BUDGETS, make_random
from mrl.verify.parity import ParityCase, measure, merge_ranks, transformers_scores

FAMILIES = ("Llama-3.1-8B", "Qwen3-8B", "Qwen3-30B-A3B")
TRAINED = ("Qwen2.5-0.5B", "Qwen2.5-1.5B")
SECONDS = dict(zip(TRAINED, (50.0, 90.0) if ON_GPU else (5.0, 5.0), strict=True))
"""Seconds for a model with one set of kernels, from the start of a process to its last update."""
HAS_FUSED = ON_GPU and transformer_engine_extension() is not None


@dataclass(frozen=True)
class Size:
    """Amount of work, which is small in a dry run."""

    rows: int
    longest: int
    budget: int


# 1.5B keeps 29 GB of activations for 8,192 tokens, and 114 GB for 32,768.
SIZE = Size(128, 2048, 8_192) if ON_GPU else Size(8, 128, 512)


def make_model(name: str, directory: Path) -> Path:
    """Make random weights of a model's published size, or on the CPU of a small model with its structure."""
    values = model_values(name)
    if not ON_GPU:
        return make_random(small_config(values, ParallelConfig()), "lm", directory / name)
    return make_random(values, "lm", directory / name, torch.bfloat16)


def parity(bench: GpuBenchmark, directory: Path) -> None:
    """Compare one rank in bfloat16 with transformers in float32."""
    for name in FAMILIES:
        with bench.attempt(name):
            model = make_random(small_config(model_values(name), ParallelConfig()), "lm", directory / f"small-{name}")
            cases = [ParityCase(str(model), "lm", ParallelConfig(), budget, dtype="bfloat16") for budget in BUDGETS]
            results = bench.on_rank(measure, cases)
            oracle = transformers_scores(model, cases[0])
            difference = max(float(np.abs(merge_ranks([result]).scores - oracle).mean()) for result in results)
            bench.row(what=name, mean_difference=difference)
            bench.goal(f"{name}: mean difference of log-probs in bfloat16 from float32", difference, at_most=0.05)


class Trainer:
    """One rank of a model that trains on random rows."""

    def __init__(self, model: str, groups: Any, megatron: dict[str, Any]) -> None:
        from mrl.engine.engine import EngineRequest, MegatronEngine
        from mrl.engine.packed_rows import TokenRows
        from mrl.models.hf_reader import HfReader

        self.spec = spec = read_spec(model)
        random = np.random.default_rng(0)
        self.lengths = lengths = random.integers(SIZE.longest // 4, SIZE.longest + 1, SIZE.rows)
        tokens = torch.from_numpy(random.integers(0, spec.vocab, int(lengths.sum())))
        self.rows = TokenRows(tokens, lengths, lengths // 2, {})
        self.settings = TrainedModelConfig(
            max_tokens_per_device=SIZE.budget, optimizer={"lr": 1e-6}, megatron=dict(megatron)
        )
        self.engine = MegatronEngine(EngineRequest(spec, "lm", self.settings), groups)
        self.engine.load(HfReader(model))
        self.micro_batches = self.cut(SIZE.budget)

    def cut(self, budget: int) -> list[Any]:
        """Return micro-batches of at most `budget` tokens."""
        from mrl.data.packing import plan_step

        return plan_step(self.lengths, 1, budget, self.engine.packing)[0]

    def update(self) -> float:
        """Do one update and return its loss."""
        from mrl.engine.scores import LossInput, LossOutput, ScoreRequest

        def loss(batch: LossInput) -> LossOutput:
            scores_T = batch.scores.log_probs_T
            assert scores_T is not None, "a policy must return log-probs"
            return LossOutput(-scores_T.sum() / len(self.rows.tokens), {"loss": -scores_T.detach().sum()})

        return self.engine.update(self.rows, self.micro_batches, loss, ScoreRequest())[0]["loss"]

    @property
    def step_flops(self) -> int:
        return 3 * sum(self.spec.sequence_flops(int(length)) for length in self.lengths)


def train_and_offload(model: str, megatron: dict[str, Any]) -> dict[str, Any]:
    """Measure updates, transfers to the host and back, peak memory and the profile of a step, on one rank."""
    from mrl.engine.offload import PartName
    from mrl.engine.parallel import model_parallel

    with model_parallel(ParallelConfig(), seed=1) as groups:
        trainer = Trainer(model, groups, megatron)
        updates, memory = timed(trainer.update, 3), trainer.engine.memory
        most_bytes = torch.cuda.max_memory_allocated() if ON_GPU else 0
        profile = profiled(trainer)
        parts: tuple[PartName, ...] = ("parameters", "gradients", "optimizer")
        ways: dict[str, list[float]] = {"out": [], "back": []}
        moved = sum(memory.device_bytes[part] for part in parts if part != "gradients")
        for _ in range(4):
            memory.changed()  # otherwise the second offload would have nothing to copy
            ways["out"].append(once(lambda: memory.offload(*parts)))
            ways["back"].append(once(lambda: memory.onload(*parts)))
        return {
            "seconds": updates.seconds,
            "tokens": int(trainer.lengths.sum()),
            "flops": trainer.step_flops,
            "moved_bytes": moved,
            "most_bytes": most_bytes,
            "profile": profile,
            **ways,
        }


def profiled(trainer: Trainer) -> dict[str, Any]:
    """Return the busy share of the device in one update, the head's share of that, and the longest kernels."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ON_GPU else [])]
    with profile(activities=activities) as profiler:
        seconds = once(trainer.update)
    kind = "device" if ON_GPU else "cpu"
    events = list(profiler.key_averages())
    # An operation's event repeats the device time of the kernels that it started.
    on_device = [event for event in events if not ON_GPU or event.device_type.name != "CPU"]
    own_s = {event.key: getattr(event, f"self_{kind}_time_total") / 1e6 for event in on_device}
    head = sum(getattr(e, f"{kind}_time_total") / 1e6 for e in events if e.key.startswith("_TokenLogProbs"))
    busy = sum(own_s.values())
    longest = sorted(own_s, key=lambda key: -own_s[key])[:5]
    return {
        "step_s": seconds,
        "busy_share": busy / seconds,
        "head_share": head / busy,
        "longest": "; ".join(f"{key[:48]} {own_s[key] / busy:.0%}" for key in longest),
    }


def variants(bench: GpuBenchmark, model: Path) -> dict[str, dict[str, bool]]:
    """Return the sets of kernels available here."""
    plain = dict.fromkeys(fused_kernels(read_spec(model)), False)
    sets = {"plain": plain, "swiglu": plain | {"bias_activation_fusion": True}}
    if HAS_FUSED:
        return sets | {"fused": {}}
    bench.row(what=model.name, kernels="fused", skipped="Transformer Engine is not here")
    return sets


def training(bench: GpuBenchmark, directory: Path) -> None:
    """Time updates with each set of kernels, and transfers to the host and back, at published model sizes."""
    rate, named = matrix_rate(), device_flops_per_s(torch.cuda.get_device_name()) if ON_GPU else None
    bench.row(what="large matrix product", tflops=rate / 1e12)
    shares = []
    for name in TRAINED:
        with bench.attempt(name):
            model = make_model(name, directory)
            for kernels, megatron in variants(bench, model).items():
                if not bench.has_time(SECONDS[name], f"{name}, {kernels}"):
                    continue
                with bench.attempt(f"{name}, {kernels}"):
                    result = bench.on_rank(train_and_offload, str(model), megatron)
                    update = Timing(result["seconds"])
                    shares.append(result["flops"] / update.median_s / rate)
                    bench.row(
                        what=name,
                        kernels=kernels,
                        tokens_per_s=result["tokens"] / update.median_s,
                        of_matrix_rate=shares[-1],
                        mfu=result["flops"] / update.median_s / named if named else None,
                        most_gb=result["most_bytes"] / 1e9,
                    )
                    bench.row(what=name, kernels=kernels, **result["profile"])
                    report_offload(bench, f"{name}, {kernels}", result)
    if ON_GPU and shares:
        bench.goal("training, share of the rate of a large matrix product", max(shares), at_least=0.4)


def report_offload(bench: GpuBenchmark, what: str, result: dict[str, Any]) -> None:
    """Compare transfers to the host and back with one copy of the same size."""
    host = torch.empty(result["moved_bytes"], dtype=torch.uint8, pin_memory=ON_GPU)
    device = torch.empty_like(host, device=DEVICE)
    for way, copy in {"out": lambda: host.copy_(device), "back": lambda: device.copy_(host)}.items():
        reachable = result["moved_bytes"] / timed(copy, 3).median_s
        reached = result["moved_bytes"] / Timing(tuple(result[way][1:])).median_s
        bench.row(what=f"{what}: {way}", gb_per_s=reached / 1e9, one_copy_gb_per_s=reachable / 1e9)
