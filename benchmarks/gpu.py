"""Measure on a GPU in calls of less than ten minutes; without a GPU, run the same parts in small on the CPU.

    python benchmarks/gpu.py [--parts kernels,head] [--only REGEX] [--limit-s 540] [--json FILE] [--dry]

Needs torch (2.11 or later), transformers and megatron-core besides this repository. Transformer Engine and vLLM are
used if they are installed. A part that needs a missing library is a row with that reason. docs/first-gpu.md has the
order of calls.

Each row is printed and written to FILE immediately. If a part, a model or a set of kernels fails, its error is a row
and a missed goal, and the next one begins. Work that would exceed the limit is skipped and reported as skipped.

kernels   attention (grouped heads, windows, two segments of a context rank), products in float32, the head and digests,
          each compared with its definition
head      seconds and memory of the log-prob head, relative to its matrix products at the rate of a large product
copies    pinned memory of exactly the requested size and torch's pinned memory, in both directions; digests per second
parity    log-probs in bfloat16 against transformers in float32, packed, two micro-batch budgets, three families
sharing   train, leave the device to two other processes, send the weights to one of them by CUDA IPC with every digest
          checked, train on to the same losses; twice
memory    memory that a process keeps after offload, by cause; the peak of an update against the plan, with three kinds
          of recomputation; the same measurements, and CUDA IPC, with expandable segments
rounding  log-probs of two packings, and of logits in bfloat16, at the entropies of trained policies
training  updates at 0.5 and 1.5 B, with plain kernels, fused SwiGLU and all fused kernels: tokens per second, share of
          the rate of a large product and of the device's peak, time of each part of a step; transfers to the host and
          back
run       with vLLM: three steps of GRPO with an engine that starts, sleeps, wakes, receives weights and is compared
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

if "--dry" in sys.argv:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # must be set before torch looks for GPUs

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu_kernels import kernels
from benchmarks.gpu_memory import memory
from benchmarks.gpu_rounding import rounding
from benchmarks.gpu_run import whole_run
from benchmarks.gpu_session import DEVICE, ON_GPU, WHOLE_PART, GpuBenchmark, matrix_rate, once, timed
from benchmarks.gpu_sharing import be_guest, sharing
from benchmarks.gpu_training import parity, training
from benchmarks.harness import Timing, parser
from mrl.engine.offload import pinned_memory
from mrl.engine.vocab_head import EntropyUse, HeadOptions, token_log_probs
from mrl.weight_sync.digest import digest

HEAD = (16_384, 3584, 152_064) if ON_GPU else (128, 64, 1024)
"""Tokens, hidden size and vocabulary: a micro-batch of a 7B model."""
COPIED_BYTES = 3 << 30 if ON_GPU else 3 << 20  # not a power of two
Part = Callable[[GpuBenchmark, Path], None]


def head(bench: GpuBenchmark, _: Path) -> None:
    """Time forward and backward of the head, with and without the entropy."""
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
            outputs: list[torch.Tensor] = []
            forward.append(once(partial(_head, hidden_TH, weight_VH, labels_T, options, outputs)))
            total = torch.stack([x.sum() for x in outputs if x.requires_grad]).sum()
            backward.append(once(total.backward))
        of_forward, of_backward = Timing(tuple(forward[1:])).median_s, Timing(tuple(backward[1:])).median_s
        bench.row(
            what=f"entropy: {entropy}",
            forward_s=of_forward,
            backward_s=of_backward,
            of_matrix_rate=4 * products_s / (of_forward + of_backward),  # backward recomputes each tile
            most_gb=(torch.cuda.max_memory_allocated() - before) / 1e9 if ON_GPU else 0.0,
        )


def _head(
    hidden_TH: torch.Tensor, weight_VH: torch.Tensor, labels_T: torch.Tensor, options: HeadOptions, outputs: list[Any]
) -> None:
    outputs += [x for x in token_log_probs(hidden_TH, weight_VH, labels_T, options) if x is not None]


def copies(bench: GpuBenchmark, _: Path) -> None:
    """Time copies to and from pinned memory, and digests."""
    source = torch.randint(0, 256, (COPIED_BYTES,), dtype=torch.uint8, device=DEVICE)
    hosts = {"torch's": torch.empty(COPIED_BYTES, dtype=torch.uint8, pin_memory=ON_GPU)}
    if ON_GPU:
        began = time.perf_counter()
        hosts["of its own size"] = pinned_memory(COPIED_BYTES)
        bench.row(what="to pin memory", gb_per_s=COPIED_BYTES / 1e9 / (time.perf_counter() - began))
    else:
        bench.row(what="of its own size", skipped="there is no CUDA to pin memory with")
    rates = {}
    for name, host in hosts.items():
        out = timed(partial(host.copy_, source, non_blocking=True), 5).median_s
        back = timed(partial(source.copy_, host, non_blocking=True), 5).median_s
        rates[name] = COPIED_BYTES / max(out, back)
        bench.row(what=f"pinned memory, {name}", out_gb_per_s=COPIED_BYTES / out / 1e9,
                  back_gb_per_s=COPIED_BYTES / back / 1e9, is_pinned=host.is_pinned() if ON_GPU else False)  # fmt: skip
        bench.goal(f"bytes that came back otherwise, {name}", int((host.to(DEVICE) != source).sum()), at_most=0)
    if ON_GPU:
        bench.goal("pinned memory beside torch's", rates["of its own size"] / rates["torch's"], at_least=0.9)
    weights = source.view(torch.bfloat16)
    bench.row(what="digests", gb_per_s=COPIED_BYTES / timed(lambda: digest(weights), 5).median_s / 1e9)


PARTS: dict[str, Part] = {
    "kernels": kernels, "head": head, "copies": copies, "parity": parity, "sharing": sharing, "memory": memory,
    "rounding": rounding, "training": training, "run": whole_run,
}  # fmt: skip
SECONDS = {
    "kernels": 20.0, "head": 20.0, "copies": 20.0, "parity": 80.0, "sharing": 115.0, "memory": 60.0, "rounding": 40.0,
    "training": 60.0, "run": 100.0,
}  # fmt: skip
"""Seconds that must be left to begin a part on a GPU. Long parts also check the clock between their pieces."""
_DRY_SECONDS = 5.0


def main() -> int:
    """Run the chosen parts one after another."""
    options = parser("Measure properties that need a GPU.")
    options.add_argument("--parts", default=",".join(PARTS), help=f"some of {', '.join(PARTS)} (default: all)")
    options.add_argument("--only", default="", help="of long parts, run the pieces whose row this expression matches")
    options.add_argument(
        "--limit-s", type=float, default=540.0, help="skip work that would not end by then (default 540)"
    )
    options.add_argument("--dry", action="store_true", help="run in small on the CPU, even if there is a GPU")
    options.add_argument("--guest", type=Path, help=argparse.SUPPRESS)
    options.add_argument("--share", type=float, help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.guest:
        be_guest(arguments.guest, arguments.share)
        return 0
    if unknown := sorted({*arguments.parts.split(",")} - PARTS.keys()):
        options.error(f"there is no part {', '.join(unknown)}: choose from {', '.join(PARTS)}")
    print(
        "on a GPU" if ON_GPU else "no GPU here: a dry run on the CPU, whose numbers do not apply to a GPU", flush=True
    )
    bench = GpuBenchmark(arguments.json, arguments.limit_s, arguments.only)
    bench.watch()
    for name in arguments.parts.split(","):
        bench.part = name
        if not bench.has_time(SECONDS[name] if ON_GPU else _DRY_SECONDS, WHOLE_PART):
            continue
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as directory, bench.attempt():
            PARTS[name](bench, Path(directory))
        bench.row(what="all of it", seconds=time.perf_counter() - began)
    return bench.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())
