"""Part of `gpu.py` that compares the plan's memory with the device's, after offload and in an update.

The plan's layers are Transformer Engine's. Without it, norms also keep their input in float32, which is added here.
"""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_session import DEVICE, ON_GPU, GpuBenchmark, once, taken_bytes
from benchmarks.gpu_sharing import take_turns
from benchmarks.gpu_training import HAS_FUSED, SECONDS, TRAINED, Trainer, make_model
from mrl.config.schema import ParallelConfig
from mrl.models.families import read_spec
from mrl.models.megatron_arguments import fused_kernels
from mrl.plan.activations import head_bytes, stage_activations
from mrl.plan.assumptions import ASSUMPTIONS

RECOMPUTED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "[mlp]": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    "all": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
BUDGETS = (4_096, 8_192) if ON_GPU else (256, 512)
LARGE_BYTES = 40 << 30 if ON_GPU else 64 << 20
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def memory(bench: GpuBenchmark, directory: Path) -> None:
    """Measure memory kept after offload, by cause, and the peaks of updates; also with expandable segments."""
    name = TRAINED[0]
    model = str(make_model(name, directory))
    for what, environment in {"": {}, ", expandable segments": EXPANDABLE}.items():
        with bench.attempt(f"what a process keeps{what}"):
            if bench.has_time(SECONDS[name] / 2, f"what a process keeps{what}"):
                report_kept(
                    bench, what, bench.on_rank(kept, model, taken_bytes() if ON_GPU else 0, environment=environment)
                )
    for what, megatron in RECOMPUTED.items():
        with bench.attempt(f"recomputing {what}"):
            if bench.has_time(SECONDS[name] / 2, f"recomputing {what}"):
                report_peaks(bench, what, model, bench.on_rank(peaks, model, megatron))
    with bench.attempt("CUDA IPC, expandable segments"):
        if bench.has_time(SECONDS[name], "CUDA IPC, expandable segments"):
            result = bench.on_rank(take_turns, model, directory / "growing.sock", 1, environment=EXPANDABLE)
            bench.row(what="CUDA IPC, expandable segments", pieces=result["pieces"], gb_per_s=result["gb_per_s"])
            bench.goal("expandable segments: pieces that arrived otherwise", result["wrong"], at_most=0)


def _torch_bytes() -> dict[str, float]:
    if not ON_GPU:
        return {}
    numbers = {
        "allocated_gb": torch.cuda.memory_allocated(),
        "reserved_gb": torch.cuda.memory_reserved(),
        "most_allocated_gb": torch.cuda.max_memory_allocated(),
        "most_reserved_gb": torch.cuda.max_memory_reserved(),
    }
    torch.cuda.reset_peak_memory_stats()
    return {name: num_bytes / 1e9 for name, num_bytes in numbers.items()}


def kept(model: str, taken_before: int) -> dict[str, Any]:
    """Return the device memory that this process holds at each stage, beyond that of earlier processes."""
    from mrl.engine.offload import free_unused_memory
    from mrl.engine.parallel import model_parallel

    stages: dict[str, dict[str, float]] = {}
    seconds: dict[str, float] = {}

    def note(what: str) -> None:
        stages[what] = {"held_gb": (taken_bytes() - taken_before) / 1e9, **_torch_bytes()}

    torch.zeros(1, device=DEVICE)
    note("a context")
    square = torch.ones(1024, 1024, device=DEVICE, dtype=torch.bfloat16)
    square @ square
    note("a matrix product")
    with model_parallel(ParallelConfig(), seed=1) as groups:
        for what, group in {"a communicator": groups.dp, "a second communicator": groups.tp}.items():
            torch.distributed.all_reduce(torch.ones(1, device=DEVICE), group=group)
            note(what)
        trainer = Trainer(model, groups, {})
        note("the optimizer built")
        seconds["first update"] = once(trainer.update)
        note("an update")
        trainer.engine.memory.offload("parameters", "gradients", "optimizer")
        note("offload")
        gc.collect()
        free_unused_memory(DEVICE)
        note("offload, garbage collected")
        much = partial(torch.empty, LARGE_BYTES, dtype=torch.uint8, device=DEVICE)
        seconds["to take much"] = once(much)
        seconds["to take it from the allocator"] = once(much)
        seconds["to empty the allocator"] = once(partial(free_unused_memory, DEVICE))
        seconds["to empty it again"] = once(partial(free_unused_memory, DEVICE))
    return {"stages": stages, "seconds": seconds}


def report_kept(bench: GpuBenchmark, what: str, result: dict[str, Any]) -> None:
    for stage, figures in result["stages"].items():
        bench.row(what=f"held after {stage}{what}", **figures)
    for action, seconds in result["seconds"].items():
        bench.row(what=f"{action}{what}", seconds=seconds, much_gb=LARGE_BYTES / 1e9)
    if ON_GPU:
        held, planned = result["stages"]["offload"]["held_gb"], ASSUMPTIONS.process_bytes / 1e9
        bench.goal(f"GB that a process holds after offload{what}", held, at_most=planned)


def peaks(model: str, megatron: dict[str, Any]) -> list[tuple[int, int | None]]:
    """Return for each budget the tokens of the largest micro-batch, and the peak bytes that an update adds."""
    from mrl.engine.parallel import model_parallel

    with model_parallel(ParallelConfig(), seed=1) as groups:
        trainer = Trainer(model, groups, megatron)
        trainer.update()  # allocates the moments
        pairs: list[tuple[int, int | None]] = []
        for budget in BUDGETS:
            trainer.micro_batches = trainer.cut(budget)
            most_tokens = max(int(trainer.lengths[rows].sum()) for rows in trainer.micro_batches)
            if ON_GPU:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated() if ON_GPU else 0
            trainer.update()
            pairs.append((most_tokens, torch.cuda.max_memory_allocated() - before if ON_GPU else None))
        return pairs


def planned_bytes(model: str, megatron: dict[str, Any], num_tokens: int) -> int:
    """Return the planned bytes of an update's activations and head, without the share for the allocator."""
    from mrl.config.schema import TrainedModelConfig

    spec = read_spec(model)
    fused = fused_kernels(spec) if HAS_FUSED else {}
    settings = TrainedModelConfig(max_tokens_per_device=num_tokens, megatron=fused | megatron)
    taken = stage_activations(spec, settings, 0, 1, "gpu" if HAS_FUSED else "cpu")  # "cpu": separate norms
    share = 1 + ASSUMPTIONS.allocator_share
    layers, at_work = taken.kept / share, taken.at_work / share
    if not HAS_FUSED:
        num_layers = 1 if megatron.get("recompute_granularity") == "full" else spec.num_layers
        layers += 2 * 4 * spec.hidden * num_layers * num_tokens
    head = head_bytes(spec, settings, "lm", backward=True, device="gpu" if ON_GPU else "cpu")
    return int(layers + max(at_work, head))  # the head is finished before backward enters a layer


def report_peaks(
    bench: GpuBenchmark, recomputed: str, model: str, measured_peaks: list[tuple[int, int | None]]
) -> None:
    """Compare peaks with the plan at each budget, and per token, where constant memory cancels out."""
    what = f"recomputing {recomputed}"
    planned = [planned_bytes(model, RECOMPUTED[recomputed], num_tokens) for num_tokens, _ in measured_peaks]
    for (num_tokens, most), planned_peak in zip(measured_peaks, planned, strict=True):
        measured = {} if most is None else {"most_gb": most / 1e9, "of_plan": most / planned_peak}
        bench.row(what=what, tokens=num_tokens, planned_gb=planned_peak / 1e9, **measured)
    (few, low), (many, high) = measured_peaks[0], measured_peaks[-1]
    by_plan = (planned[-1] - planned[0]) / (many - few)
    if low is None or high is None:
        bench.row(what=f"{what}, per token", planned=by_plan, skipped="a CPU's allocator does not report its peak")
        return
    per_token = (high - low) / (many - few)
    bench.row(what=f"{what}, per token", bytes=per_token, planned=by_plan, of_plan=per_token / by_plan)
    bench.goal(f"{what}: bytes per token, share off the plan", abs(per_token / by_plan - 1), at_most=0.03)
