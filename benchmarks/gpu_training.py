"""The parts of `gpu.py` that train: parity, speed, and a device that two processes take turns on. See there."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import Benchmark, Timing
from mrl.config.hardware import device_flops_per_s
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
TRAINED = ("Qwen2.5-0.5B", "Qwen2.5-1.5B")
LIMIT_S = 300.0
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
RANKS_ON: Device = "gpu" if ON_GPU else "cpu"
GUEST_SHARE = 0.85
"""Of a GPU, what the other process takes of it, as an engine does."""


@dataclass(frozen=True)
class Size:
    """How much is done, so that a dry run ends."""

    rows: int
    longest: int
    budget: int
    matrix: int
    slot_bytes: int


SIZE = Size(128, 2048, 32_768, 8192, 1 << 30) if ON_GPU else Size(8, 128, 512, 512, 4 << 20)


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


def matrix_rate() -> float:
    """Operations per second of a large product in bfloat16."""
    a = torch.randn(SIZE.matrix, SIZE.matrix, device=DEVICE, dtype=torch.bfloat16)
    return 2 * SIZE.matrix**3 / timed(lambda: a @ a, 5).median_s


def make_model(name: str, directory: Path) -> Path:
    """Random weights of its published size, on the CPU of a small model of its shape."""
    values = model_values(name)
    return make_random(values if ON_GPU else small_config(values, ParallelConfig()), "lm", directory / name)


def parity(bench: Benchmark, directory: Path) -> None:
    """One rank in bfloat16 against transformers in float32."""
    worst = 0.0
    for name in FAMILIES:
        model = make_random(small_config(model_values(name), ParallelConfig()), "lm", directory / f"small-{name}")
        cases = [ParityCase(str(model), "lm", ParallelConfig(), budget, dtype="bfloat16") for budget in BUDGETS]
        (found,) = run_distributed(1, measure, cases, timeout_s=LIMIT_S, device=RANKS_ON)
        oracle = transformers_scores(model, cases[0])
        difference = max(float(np.abs(merge_ranks([result]).scores - oracle).mean()) for result in found)
        bench.row(part="parity", what=name, mean_difference=difference)
        worst = max(worst, difference)
    bench.goal("mean difference of log-probs in bfloat16 from float32", worst, at_most=0.05)


class Trainer:
    """One rank of a model, which trains on random rows."""

    def __init__(self, model: str, groups: Any, kernels: dict[str, bool]) -> None:
        from mrl.data.packing import plan_step
        from mrl.engine.engine import EngineRequest, MegatronEngine
        from mrl.engine.packed_rows import TokenRows
        from mrl.models.hf_reader import HfReader

        self.spec = spec = read_spec(model)
        chance = np.random.default_rng(0)
        self.lengths = lengths = chance.integers(SIZE.longest // 4, SIZE.longest + 1, SIZE.rows)
        tokens = torch.from_numpy(chance.integers(0, spec.vocab, int(lengths.sum())))
        self.rows = TokenRows(tokens, lengths, lengths // 2, {})
        settings = TrainedModelConfig(max_tokens_per_device=SIZE.budget, optimizer={"lr": 1e-6}, megatron=kernels)
        self.engine = MegatronEngine(EngineRequest(spec, "lm", settings), groups)
        self.engine.load(HfReader(model))
        self.cut = plan_step(lengths, 1, SIZE.budget, self.engine.packing)[0]

    def update(self) -> float:
        """One step; its loss."""
        from mrl.engine.scores import LossInput, LossOutput, ScoreRequest

        def loss(batch: LossInput) -> LossOutput:
            scores_T = batch.scores.log_probs_T
            assert scores_T is not None, "a policy gives log-probs"
            return LossOutput(-scores_T.sum() / len(self.rows.tokens), {"loss": -scores_T.detach().sum()})

        return self.engine.update(self.rows, self.cut, loss, ScoreRequest())[0]["loss"]

    @property
    def step_flops(self) -> int:
        return 3 * sum(self.spec.sequence_flops(int(length)) for length in self.lengths)


def train_and_offload(model: str, kernels: dict[str, bool]) -> dict[str, Any]:
    """On one rank: seconds of updates and of the ways to the host and back, and the most memory that was taken."""
    from mrl.engine.offload import PartName
    from mrl.engine.parallel import model_parallel

    with model_parallel(ParallelConfig(), seed=1) as groups:
        trainer = Trainer(model, groups, kernels)
        updates, memory = timed(trainer.update, 3), trainer.engine.memory
        parts: tuple[PartName, ...] = ("parameters", "gradients", "optimizer")
        ways: dict[str, list[float]] = {"out": [], "back": []}
        moved = sum(memory.device_bytes[part] for part in parts if part != "gradients")
        for _ in range(4):
            memory.changed()  # or the second time nothing would have to be copied
            ways["out"].append(once(lambda: memory.offload(*parts)))
            ways["back"].append(once(lambda: memory.onload(*parts)))
        return {
            "seconds": updates.seconds,
            "tokens": int(trainer.lengths.sum()),
            "flops": trainer.step_flops,
            "moved_bytes": moved,
            "most_bytes": torch.cuda.max_memory_allocated() if ON_GPU else 0,
            **ways,
        }


def training(bench: Benchmark, directory: Path) -> None:
    """Updates of models of their published size, with fused kernels and without, and the ways to the host and back."""
    from mrl.engine.layer_spec import has_transformer_engine

    rate, named = matrix_rate(), device_flops_per_s(torch.cuda.get_device_name()) if ON_GPU else None
    shares = []
    for name in TRAINED:
        model = make_model(name, directory)
        variants: dict[str, dict[str, bool]] = {"plain": dict.fromkeys(read_spec(model).fused_kernels(), False)}
        if has_transformer_engine():
            variants["fused"] = {}
        else:
            bench.row(part="training", what=name, kernels="fused", skipped="Transformer Engine is not here")
        for kernels, settings in variants.items():
            found = run_distributed(1, train_and_offload, str(model), settings, timeout_s=LIMIT_S, device=RANKS_ON)[0]
            update = Timing(found["seconds"])
            shares.append(found["flops"] / update.median_s / rate)
            bench.row(
                part="training",
                what=name,
                kernels=kernels,
                tokens_per_s=found["tokens"] / update.median_s,
                of_matrix_rate=shares[-1],
                mfu=found["flops"] / update.median_s / named if named else None,
                most_gb=found["most_bytes"] / 1e9,
            )
    bench.row(part="training", what="large matrix product", tflops=rate / 1e12)
    host = torch.empty(found["moved_bytes"], dtype=torch.uint8, pin_memory=ON_GPU)
    there = torch.empty_like(host, device=DEVICE)
    for way, copy in {"out": lambda: host.copy_(there), "back": lambda: there.copy_(host)}.items():
        reachable = found["moved_bytes"] / timed(copy, 3).median_s
        reached = found["moved_bytes"] / Timing(tuple(found[way][1:])).median_s
        bench.row(part="offload", what=way, gb_per_s=reached / 1e9, one_copy_gb_per_s=reachable / 1e9)
    if ON_GPU:
        bench.goal("training, share of the rate of a large matrix product", max(shares), at_least=0.4)


# --- two processes on one device --------------------------------------------------------------------------------------


def be_guest(path: Path) -> None:
    """The other process: does what it is told, line by line, as an engine would between two rollouts."""
    receiver, held = IpcReceiver(path, LIMIT_S), []
    for order in sys.stdin:
        if order == "take\n":
            num_bytes = int(torch.cuda.mem_get_info()[1] * GUEST_SHARE) if ON_GPU else 1 << 26
            held.append(torch.full((num_bytes,), 7, dtype=torch.uint8, device=DEVICE))
            answer = f"{num_bytes} {int(held[0][-1])}"
        elif order == "give back\n":
            held.clear()
            if ON_GPU:
                torch.cuda.empty_cache()
            answer = "done"
        else:
            found = {name: digest(part) for bucket in receiver.buckets() for name, part in bucket.tensors.items()}
            receiver.reply(found)
            answer = f"{len(found)}"
        print(answer, flush=True)


class Guest:
    """The other process, as the trainer sees it."""

    def __init__(self, path: Path) -> None:
        command = [sys.executable, str(Path(__file__).with_name("gpu.py")), "--guest", str(path)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin is not None, "it is a pipe"
        assert self._process.stdout is not None, "it is a pipe"
        self._orders, self._answers = self._process.stdin, self._process.stdout

    def tell(self, order: str) -> None:
        self._orders.write(f"{order}\n")
        self._orders.flush()

    def answer(self) -> list[str]:
        return self._answers.readline().split()

    def leave(self) -> None:
        self._orders.close()
        self._process.wait(LIMIT_S)


def train_alone(model: str) -> list[float]:
    """The losses of a trainer whom nobody disturbs."""
    from mrl.engine.parallel import model_parallel

    with model_parallel(ParallelConfig(), seed=1) as groups:
        trainer = Trainer(model, groups, {})
        return [trainer.update() for _ in range(4)]


def take_turns(model: str, path: Path) -> dict[str, Any]:
    """Train; leave the device to the guest; send it the weights; and the same again."""
    from mrl.engine.parallel import model_parallel

    guest, found = Guest(path), dict[str, Any](losses=[], taken=[], wrong=0)
    sent_bytes, seconds = 0, 0.0
    with model_parallel(ParallelConfig(), seed=1) as groups:
        trainer = Trainer(model, groups, {})
        memory, weights = trainer.engine.memory, dict(trainer.engine.models[0].named_parameters())
        for _ in range(2):
            found["losses"] += [trainer.update() for _ in range(2)]
            memory.offload("parameters", "gradients", "optimizer")
            for order in ("take", "give back"):
                guest.tell(order)
                found["taken"].append(guest.answer())
            memory.onload("parameters")
            memory.need("parameters")
            began = time.perf_counter()
            guest.tell("receive")
            sender = IpcSender(path, SIZE.slot_bytes, DEVICE, LIMIT_S)
            expected = send(sender, weights)
            found["wrong"] += len(set(expected.items()) ^ set(sender.end().items()))
            sender.close()
            guest.answer()
            seconds += time.perf_counter() - began
            sent_bytes += sum(each.nbytes for each in weights.values())
            memory.onload("gradients", "optimizer")
    guest.leave()
    return found | {"gb_per_s": sent_bytes / seconds / 1e9}


def send(sender: IpcSender, tensors: dict[str, torch.nn.Parameter]) -> dict[str, str]:
    """Everything in pieces that fit into a slot; the digests of the pieces."""
    sender.begin(1)
    expected = {}
    for name, tensor in tensors.items():
        pieces = torch.split(tensor.detach().flatten(), SIZE.slot_bytes // tensor.element_size())
        for number, piece in enumerate(pieces):
            slot = sender.slot()
            placed = TensorView(f"{name}/{number}", piece.dtype, tuple(piece.shape), 0)
            placed.view(slot.buffer).copy_(piece)
            sender.send(slot, [placed])
            expected[placed.name] = digest(piece.clone())  # numpy may look at the copy
    return expected


def sharing(bench: Benchmark, directory: Path) -> None:
    """A trainer that leaves its device to another process, twice."""
    path, model = directory / "guest.sock", make_model(TRAINED[0], directory / "shared")
    (alone,) = run_distributed(1, train_alone, str(model), timeout_s=LIMIT_S, device=RANKS_ON)
    (found,) = run_distributed(1, take_turns, str(model), path, timeout_s=LIMIT_S, device=RANKS_ON)
    pairs = zip(found["losses"], alone, strict=True)
    difference = max(abs(one - other) / abs(other) for one, other in pairs)
    for number, (num_bytes, content) in enumerate(found["taken"][::2], 1):
        bench.row(part="sharing", what=f"taken by the other process, time {number}", gb=int(num_bytes) / 1e9)
        bench.goal("what the other process reads of its memory", int(content), at_least=7)
    bench.row(part="sharing", what="weights by CUDA IPC, digests included", gb_per_s=found["gb_per_s"])
    bench.goal("pieces that arrived otherwise", found["wrong"], at_most=0)
    # Attention's backward adds in any order on a GPU.
    bench.goal("losses beside those of an undisturbed trainer", difference, at_most=1e-3 if ON_GPU else 0.0)
