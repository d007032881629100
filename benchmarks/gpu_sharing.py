"""Part of `gpu.py` where a trainer leaves its device to two other processes, and sends its weights to one of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_session import DEVICE, ON_GPU, GpuBenchmark
from benchmarks.gpu_training import TRAINED, Trainer, make_model
from mrl.config.schema import ParallelConfig
from mrl.weight_sync.digest import digest
from mrl.weight_sync.ipc import IpcReceiver, IpcSender, TensorView

SHARES = {"engine": 0.6, "critic": 0.25}
"""Share of the GPU's memory that each of the other processes takes, both at the same time."""
SLOT_BYTES = 1 << 30 if ON_GPU else 4 << 20
_CPU_GUEST_BYTES, _LIMIT_S, _CONTENT = 1 << 26, 60.0, 7


def be_guest(path: Path, share: float) -> None:
    """Execute the trainer's orders, one per line, like an engine or a critic while the trainer waits."""
    receiver, blocks = None, []
    for order in sys.stdin:
        if order == "take\n":
            free, total = torch.cuda.mem_get_info() if ON_GPU else _host_memory()
            num_bytes = int(total * share) if ON_GPU else _CPU_GUEST_BYTES
            blocks.append(torch.full((num_bytes,), _CONTENT, dtype=torch.uint8, device=DEVICE))
            answer = f"{free} {num_bytes} {int(blocks[0][-1])}"
        elif order == "give back\n":
            blocks.clear()
            if ON_GPU:
                torch.cuda.empty_cache()
            answer = "done"
        else:
            receiver = receiver or IpcReceiver(path, _LIMIT_S)
            digests = {name: digest(part) for bucket in receiver.buckets() for name, part in bucket.tensors.items()}
            receiver.reply(digests)
            answer = f"{len(digests)}"
        print(answer, flush=True)


def _host_memory() -> tuple[int, int]:
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


class Guest:
    """Another process on the trainer's device."""

    def __init__(self, path: Path, share: float) -> None:
        gpu = str(Path(__file__).with_name("gpu.py"))
        command = [sys.executable, gpu, "--guest", str(path), "--share", str(share)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin is not None, "stdin is a pipe"
        assert self._process.stdout is not None, "stdout is a pipe"
        self._orders, self._answers = self._process.stdin, self._process.stdout

    def tell(self, order: str) -> None:
        self._orders.write(f"{order}\n")
        self._orders.flush()

    def answer(self) -> list[str]:
        if line := self._answers.readline():
            return line.split()
        raise RuntimeError(f"a guest ended with status {self._process.wait(_LIMIT_S)}; see its error above")

    def leave(self) -> None:
        self._orders.close()
        self._process.wait(_LIMIT_S)


def train_alone(model: str) -> list[float]:
    """Return the losses of a trainer with the device to itself."""
    from mrl.engine.parallel import model_parallel

    with model_parallel(ParallelConfig(), seed=1) as groups:
        trainer = Trainer(model, groups, {})
        return [trainer.update() for _ in range(4)]


def take_turns(model: str, path: Path, num_turns: int = 2) -> dict[str, Any]:
    """Train, leave the device to the guests, send the weights to the engine, and repeat."""
    from mrl.engine.parallel import model_parallel

    guests = {name: Guest(path, share) for name, share in SHARES.items()}
    result = dict[str, Any](losses=[], taken=[], wrong=0, pieces=0)
    sent_bytes, seconds = 0, 0.0
    with model_parallel(ParallelConfig(), seed=1) as groups:
        trainer = Trainer(model, groups, {})
        memory, weights = trainer.engine.memory, dict(trainer.engine.models[0].named_parameters())
        for _ in range(num_turns):
            result["losses"] += [trainer.update() for _ in range(2)]
            memory.offload("parameters", "gradients", "optimizer")
            result["taken"].append(_left_to(guests))
            memory.onload("parameters")
            memory.need("parameters")
            began = time.perf_counter()
            guests["engine"].tell("receive")
            sender = IpcSender(path, SLOT_BYTES, DEVICE, _LIMIT_S)
            expected = send(sender, weights)
            result["wrong"] += len(set(expected.items()) ^ set(sender.end().items()))
            result["pieces"] += len(expected)
            sender.close()
            guests["engine"].answer()
            seconds += time.perf_counter() - began
            sent_bytes += sum(weight.nbytes for weight in weights.values())
            memory.onload("gradients", "optimizer")
    for guest in guests.values():
        guest.leave()
    return result | {"gb_per_s": sent_bytes / seconds / 1e9}


def _left_to(guests: dict[str, Guest]) -> dict[str, list[int]]:
    """Let each guest take its share while earlier guests keep theirs. Return the answer of each."""
    taken = {}
    for name, guest in guests.items():
        guest.tell("take")
        taken[name] = [int(word) for word in guest.answer()]
    for guest in guests.values():
        guest.tell("give back")
        guest.answer()
    return taken


def send(sender: IpcSender, tensors: dict[str, torch.nn.Parameter]) -> dict[str, str]:
    """Send all tensors in pieces that fit into a slot. Return the digests of the pieces."""
    sender.begin(1)
    expected = {}
    for name, tensor in tensors.items():
        pieces = torch.split(tensor.detach().flatten(), SLOT_BYTES // tensor.element_size())
        for number, piece in enumerate(pieces):
            slot = sender.slot()
            placed = TensorView(f"{name}/{number}", piece.dtype, tuple(piece.shape), 0)
            placed.view(slot.buffer).copy_(piece)
            sender.send(slot, [placed])
            expected[placed.name] = digest(piece.clone())  # a copy, which numpy may read
    return expected


def sharing(bench: GpuBenchmark, directory: Path) -> None:
    """Let a trainer leave its device to two processes, twice, and compare its losses with an undisturbed trainer."""
    model = str(make_model(TRAINED[0], directory / "shared"))
    result = bench.on_rank(take_turns, model, directory / "guest.sock")
    for number, taken in enumerate(result["taken"], 1):
        for name, (free, num_bytes, content) in taken.items():
            bench.row(what=f"{name} takes, turn {number}", free_before_gb=free / 1e9, gb=num_bytes / 1e9)
            bench.goal(f"what the {name} reads of its memory", content, at_least=_CONTENT)
    bench.row(what="weights by CUDA IPC, digests included", pieces=result["pieces"], gb_per_s=result["gb_per_s"])
    bench.goal("pieces that arrived otherwise", result["wrong"], at_most=0)
    with bench.attempt("an undisturbed trainer"):
        alone = bench.on_rank(train_alone, model)
        pairs = list(zip(result["losses"], alone, strict=True))
        difference = max(abs(one - other) / abs(other) for one, other in pairs)
        bench.row(what="losses", shared=str(result["losses"]), alone=str(alone))
        # On a GPU, attention's backward adds in arbitrary order.
        bench.goal("losses beside those of an undisturbed trainer", difference, at_most=1e-3 if ON_GPU else 0.0)
