"""What only a GPU can show, in one command of some minutes; without one, a dry run of the same code on the CPU.

    python benchmarks/gpu.py [--model Qwen2.5-0.5B] [--json FILE]

Needs torch, transformers and megatron-core beside this repository; Transformer Engine is used where it is there.
parity    log-probs in bfloat16 against transformers in float32, packed, two micro-batch budgets, three families
training  updates of packed rows: tokens per second, and the share of the rate that a large matrix product reaches here
offload   parameters and optimizer to the host and back, beside one copy of pinned memory of that size
hand-over buckets from this process to another by CUDA IPC (on the CPU a memfd), beside one copy on the device
The log-prob head has a benchmark of its own, which uses the GPU by itself: benchmarks/logprob.py.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Benchmark, Timing, parser
from mrl.config.schema import ParallelConfig, TrainedModelConfig
from mrl.models.families import read_spec
from mrl.models.small import small_config
from mrl.plan.known_models import model_values
from mrl.verify.layout import BUDGETS, make_random
from mrl.verify.parity import ParityCase, measure, merge_ranks, transformers_scores
from mrl.verify.spawn import Device, run_distributed
from mrl.weight_sync.digest import digest
from mrl.weight_sync.ipc import IpcReceiver, IpcSender, TensorView

FAMILIES = ("Llama-3.1-8B", "Qwen3-8B", "Qwen3-30B-A3B")
LIMIT_S = 300.0
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
RANKS_ON: Device = "gpu" if ON_GPU else "cpu"


@dataclass(frozen=True)
class Size:
    """How much is done, so that a dry run ends."""

    rows: int
    longest: int
    budget: int
    matrix: int
    slot_bytes: int
    buckets: int


SIZE = Size(128, 2048, 32_768, 8192, 1 << 30, 8) if ON_GPU else Size(8, 128, 512, 512, 4 << 20, 4)


def once(action: Callable[[], object]) -> float:
    """Seconds of an action, the device's work included."""
    began = time.perf_counter()
    action()
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def timed(action: Callable[[], object], repeats: int) -> Timing:
    """Several times, after once to get warm."""
    return Timing(tuple(once(action) for _ in range(repeats + 1))[1:])


def parity(bench: Benchmark, directory: Path) -> None:
    """One rank in bfloat16 against transformers in float32."""
    worst = 0.0
    for name in FAMILIES:
        model = make_random(small_config(model_values(name), ParallelConfig()), "lm", directory / name)
        cases = [ParityCase(str(model), "lm", ParallelConfig(), budget, dtype="bfloat16") for budget in BUDGETS]
        (found,) = run_distributed(1, measure, cases, timeout_s=LIMIT_S, device=RANKS_ON)
        oracle = transformers_scores(model, cases[0])
        difference = max(float(np.abs(merge_ranks([result]).scores - oracle).mean()) for result in found)
        bench.row(part="parity", what=name, mean_difference=difference)
        worst = max(worst, difference)
    bench.goal("mean difference of log-probs in bfloat16 from float32", worst, at_most=0.05)


def train_and_offload(model: str, size: Size) -> dict[str, Any]:
    """On one rank: seconds of updates and of the ways to the host and back."""
    from mrl.engine.engine import EngineRequest, MegatronEngine
    from mrl.engine.offload import PartName
    from mrl.engine.packed_rows import TokenRows
    from mrl.engine.parallel import model_parallel
    from mrl.engine.scores import LossInput, LossOutput, ScoreRequest
    from mrl.models.hf_reader import HfReader

    spec = read_spec(model)
    chance = np.random.default_rng(0)
    lengths = chance.integers(size.longest // 4, size.longest + 1, size.rows)
    rows = TokenRows(torch.from_numpy(chance.integers(0, spec.vocab, int(lengths.sum()))), lengths, lengths // 2, {})
    settings = TrainedModelConfig(max_tokens_per_device=size.budget, optimizer={"lr": 1e-6})

    def loss(batch: LossInput) -> LossOutput:
        scores_T = batch.scores.log_probs_T
        assert scores_T is not None, "a policy gives log-probs"
        return LossOutput(-scores_T.mean(), {})

    with model_parallel(ParallelConfig(), seed=1) as groups:
        from mrl.data.packing import plan_step

        engine = MegatronEngine(EngineRequest(spec, "lm", settings), groups)
        engine.load(HfReader(model))
        plan = plan_step(lengths, 1, size.budget, engine.packing)
        cut = plan.micro_batches[0]
        updates = timed(lambda: engine.update(rows, cut, loss, ScoreRequest()), 3)
        parts: tuple[PartName, ...] = ("parameters", "gradients", "optimizer")
        num_bytes = sum(engine.memory.device_bytes[part] for part in parts if part != "gradients")
        ways: dict[str, list[float]] = {"out": [], "back": []}
        for _ in range(4):
            engine.memory.changed()  # or the second time nothing would have to be copied
            ways["out"].append(once(lambda: engine.memory.offload(*parts)))
            ways["back"].append(once(lambda: engine.memory.onload(*parts)))
        return {
            "seconds": updates.seconds,
            "tokens": int(lengths.sum()),
            "flops": 3 * sum(spec.sequence_flops(int(length)) for length in lengths),
            "moved_bytes": num_bytes,
            **ways,
        }


def matrix_rate() -> float:
    """Operations per second of a large product in bfloat16."""
    a = torch.randn(SIZE.matrix, SIZE.matrix, device=DEVICE, dtype=torch.bfloat16)
    return 2 * SIZE.matrix**3 / timed(lambda: a @ a, 5).median_s


def training(bench: Benchmark, name: str, directory: Path) -> None:
    """Updates and offload of a model of its published size (on the CPU of a small one of its shape)."""
    values = model_values(name)
    model = make_random(values if ON_GPU else small_config(values, ParallelConfig()), "lm", directory / "trained")
    (found,) = run_distributed(1, train_and_offload, str(model), SIZE, timeout_s=LIMIT_S, device=RANKS_ON)
    update, rate = Timing(found["seconds"]), matrix_rate()
    share = found["flops"] / update.median_s / rate
    bench.row(
        part="training",
        what=name if ON_GPU else f"small {values['model_type']}",
        tokens_per_s=found["tokens"] / update.median_s,
        of_matrix_rate=share,
        matrix_tflops=rate / 1e12,
    )
    host = torch.empty(found["moved_bytes"], dtype=torch.uint8, pin_memory=ON_GPU)
    there = torch.empty_like(host, device=DEVICE)
    for way, copy in {"out": lambda: host.copy_(there), "back": lambda: there.copy_(host)}.items():
        reachable = found["moved_bytes"] / timed(copy, 3).median_s
        reached = found["moved_bytes"] / Timing(tuple(found[way][1:])).median_s
        bench.row(part="offload", what=way, gb_per_s=reached / 1e9, one_copy_gb_per_s=reachable / 1e9)
    if ON_GPU:
        bench.goal("training, share of the rate of a large matrix product", share, at_least=0.4)


def receive(path: Path) -> None:
    """The other process: it copies every bucket into memory of its own."""
    receiver = IpcReceiver(path, LIMIT_S)
    held: dict[str, torch.Tensor] = {}
    for bucket in receiver.buckets():
        for name, tensor in bucket.tensors.items():
            held.setdefault(name, torch.empty_like(tensor)).copy_(tensor)
    receiver.reply({name: digest(tensor) for name, tensor in held.items()})


def handing_over(bench: Benchmark, directory: Path) -> None:
    """Buckets from here to there."""
    path = directory / "there.sock"
    with subprocess.Popen([sys.executable, __file__, "--receive", str(path)]) as process:
        sender = IpcSender(path, SIZE.slot_bytes, DEVICE, LIMIT_S)
        sender.begin(1)
        # One name a slot, so that the receiver copies each bucket into memory that it has by then.
        filled = TensorView("weight", torch.bfloat16, (SIZE.slot_bytes // 2,), 0)
        source = torch.randn(SIZE.slot_bytes // 2, device=DEVICE, dtype=torch.bfloat16)
        for number in range(SIZE.buckets + 2):
            if number == 2:  # both slots are mapped by now
                began = time.perf_counter()
            slot = sender.slot()
            filled.view(slot.buffer).copy_(source)
            sender.send(slot, [filled])
        arrived = sender.end()
        seconds = time.perf_counter() - began
        sender.close()
        process.wait(LIMIT_S)
    copy = timed(source.clone, 5).median_s
    rate = SIZE.buckets * SIZE.slot_bytes / seconds
    bench.row(part="hand-over", what="CUDA IPC" if ON_GPU else "memfd", gb_per_s=rate / 1e9)
    bench.row(part="hand-over", what="one copy", gb_per_s=SIZE.slot_bytes / copy / 1e9)
    bench.goal("buckets that arrived otherwise", float(arrived != {"weight": digest(source)}), at_most=0)


def main() -> int:
    """Everything, one after another."""
    options = parser("What only a GPU can show.")
    options.add_argument("--model", default="Qwen2.5-0.5B", help="whose size is trained (default Qwen2.5-0.5B)")
    options.add_argument("--receive", type=Path, help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.receive:
        receive(arguments.receive)
        return 0
    print("on a GPU" if ON_GPU else "no GPU here: a dry run on the CPU, whose figures say nothing of one")
    bench = Benchmark("gpu")
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        parity(bench, directory)
        training(bench, arguments.model, directory)
        handing_over(bench, directory)
    return bench.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())
