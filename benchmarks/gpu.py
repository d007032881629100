"""What only a GPU can show, in one command of less than ten minutes; without one, a dry run of the same on the CPU.

    python benchmarks/gpu.py [--parts parity,run] [--json FILE]

Needs torch (2.11 or later), transformers and megatron-core beside this repository. Transformer Engine and vLLM are used
where they are; what cannot be done without them is a row that says so. A part that fails is a goal missed, with its
error, and the next part begins.

parity    log-probs in bfloat16 against transformers in float32, packed, two micro-batch budgets, three families
head      seconds of the log-prob head beside its matrix products at the rate of a large one, and its memory
copies    pinned memory of its own size beside torch's, there and back; digests per second
training  updates at 0.5 and 1.5 B, with fused kernels and without: tokens per second, share of the rate of a large
          product and of the device's; the ways to the host and back
sharing   train, leave the device to another process that takes 85 % of it, send it the weights by CUDA IPC with every
          digest checked, train on to the same losses; twice
run       with vLLM: three steps of GRPO with an engine that starts, sleeps, wakes, takes weights in and is compared
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu_run import whole_run
from benchmarks.gpu_training import DEVICE, ON_GPU, be_guest, matrix_rate, once, parity, sharing, timed, training
from benchmarks.harness import Benchmark, Timing, parser
from mrl.engine.offload import pinned_memory
from mrl.engine.vocab_head import EntropyUse, HeadOptions, token_log_probs
from mrl.weight_sync.digest import digest

HEAD = (16_384, 3584, 152_064) if ON_GPU else (128, 64, 1024)
"""Tokens, hidden size and vocabulary: a micro-batch of a 7B model."""
COPIED_BYTES = 3 << 30 if ON_GPU else 3 << 20  # no power of two
Part = Callable[[Benchmark, Path], None]


def head(bench: Benchmark, _: Path) -> None:
    """Forward and backward, with the entropy and without."""
    num_tokens, hidden_size, vocab = HEAD
    products_s = 2 * num_tokens * hidden_size * vocab / matrix_rate()
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    hidden_TH = torch.randn(num_tokens, hidden_size, device=DEVICE, dtype=dtype, requires_grad=True)
    weight_VH = (0.02 * torch.randn(vocab, hidden_size, device=DEVICE, dtype=dtype)).requires_grad_()
    labels_T = torch.randint(0, vocab, (num_tokens,), device=DEVICE)
    uses: tuple[EntropyUse, ...] = ("none", "value", "grad")
    for entropy in uses:
        options = HeadOptions(vocab, 1.0, entropy)
        if ON_GPU:
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if ON_GPU else 0
        forward, backward = [], []
        for _number in range(4):
            hidden_TH.grad = weight_VH.grad = None
            found: list[torch.Tensor] = []
            forward.append(once(partial(_head, hidden_TH, weight_VH, labels_T, options, found)))
            total = torch.stack([x.sum() for x in found if x.requires_grad]).sum()
            backward.append(once(total.backward))
        of_forward, of_backward = Timing(tuple(forward[1:])).median_s, Timing(tuple(backward[1:])).median_s
        bench.row(
            part="head",
            what=f"entropy: {entropy}",
            forward_s=of_forward,
            backward_s=of_backward,
            of_matrix_rate=4 * products_s / (of_forward + of_backward),  # backward makes each tile again
            most_gb=(torch.cuda.max_memory_allocated() - before) / 1e9 if ON_GPU else 0.0,
        )


def _head(
    hidden_TH: torch.Tensor, weight_VH: torch.Tensor, labels_T: torch.Tensor, options: HeadOptions, found: list[Any]
) -> None:
    found += [x for x in token_log_probs(hidden_TH, weight_VH, labels_T, options) if x is not None]


def copies(bench: Benchmark, _: Path) -> None:
    """Pinned memory and digests."""
    there = torch.randint(0, 256, (COPIED_BYTES,), dtype=torch.uint8, device=DEVICE)
    hosts = {"torch's": torch.empty(COPIED_BYTES, dtype=torch.uint8, pin_memory=ON_GPU)}
    if ON_GPU:
        began = time.perf_counter()
        hosts["of its own size"] = pinned_memory(COPIED_BYTES)
        bench.row(part="copies", what="to pin memory", gb_per_s=COPIED_BYTES / 1e9 / (time.perf_counter() - began))
    else:
        bench.row(part="copies", what="of its own size", skipped="there is no CUDA to pin memory with")
    rates = {}
    for name, host in hosts.items():
        out = timed(partial(host.copy_, there, non_blocking=True), 5).median_s
        back = timed(partial(there.copy_, host, non_blocking=True), 5).median_s
        rates[name] = COPIED_BYTES / max(out, back)
        bench.row(part="copies", what=f"pinned memory, {name}", out_gb_per_s=COPIED_BYTES / out / 1e9,
                  back_gb_per_s=COPIED_BYTES / back / 1e9, is_pinned=host.is_pinned() if ON_GPU else False)  # fmt: skip
        bench.goal(f"bytes that came back otherwise, {name}", int((host.to(DEVICE) != there).sum()), at_most=0)
    if ON_GPU:
        bench.goal("pinned memory beside torch's", rates["of its own size"] / rates["torch's"], at_least=0.9)
    weights = there.view(torch.bfloat16)
    bench.row(part="copies", what="digests", gb_per_s=COPIED_BYTES / timed(lambda: digest(weights), 5).median_s / 1e9)


PARTS: dict[str, Part] = {
    "parity": parity, "head": head, "copies": copies, "training": training, "sharing": sharing, "run": whole_run,
}  # fmt: skip


def main() -> int:
    """Everything, one after another."""
    options = parser("What only a GPU can show.")
    options.add_argument("--parts", default=",".join(PARTS), help=f"some of {', '.join(PARTS)} (default: all)")
    options.add_argument("--guest", type=Path, help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.guest:
        be_guest(arguments.guest)
        return 0
    print("on a GPU" if ON_GPU else "no GPU here: a dry run on the CPU, whose figures say nothing of one", flush=True)
    bench = Benchmark("gpu")
    for name in arguments.parts.split(","):
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as directory:
            try:
                PARTS[name](bench, Path(directory))
            except Exception:  # on a machine that is lent for minutes, the other parts still count
                traceback.print_exc()
                bench.goal(f"{name}: errors", 1, at_most=0)
        bench.row(part=name, what="all of it", seconds=time.perf_counter() - began)
        if ON_GPU:
            torch.cuda.empty_cache()
    return bench.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())
