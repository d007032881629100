"""Log-probs of tokens from hidden states, forward and backward: tiles of the vocabulary compared with plain
log_softmax.

    python benchmarks/logprob.py [--quick] [--json FILE]

Every run is a separate process, and the two candidates alternate. Inputs are float32 on a CPU, bfloat16 on a GPU (used
if there is one). `extra` is the peak memory during forward and backward, without the memory at their start and without
the returned gradients: resident memory of the process on a CPU, allocated memory on a GPU. If a candidate does not fit
into the limit (on a CPU 10 GiB of address space beyond the libraries), this is its result.

Errors are the largest absolute differences from float64, relative to the largest value. The incoming gradient is zero
except for some tokens, so that float64 can check everything these contribute; the computation is the same.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Benchmark, Timing, parser
from mrl.engine.vocab_head import HeadOptions, token_log_probs

TOKENS, VOCABULARIES = (2048, 4096, 8192, 16384), (32_000, 128_256, 151_936)
QUICK, GOAL = (2048, 128_256), (4096, 151_936)
CPU_LIMIT_BYTES = 10 << 30
NUM_CHECKED = 64
MIB = 1 << 20
TOLERANCE = 2e-2 if torch.cuda.is_available() else 1e-4  # bfloat16 gradients have 8 bits
LogProbs = Callable[[Tensor, Tensor, Tensor], Tensor]


def tiled(hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor) -> Tensor:
    """Compute log-probs with mrl."""
    return token_log_probs(hidden_TH, weight_VH, labels_T, HeadOptions(len(weight_VH), 1.0, "none"))[0]


def plain(hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor) -> Tensor:
    """Compute log-probs in the obvious way, in float32 like mrl."""
    log_probs_TV = torch.log_softmax(hidden_TH @ weight_VH.t(), dim=-1, dtype=torch.float32)
    return log_probs_TV.gather(1, labels_T.unsqueeze(1)).squeeze(1)


CANDIDATES: dict[str, LogProbs] = {"ours": tiled, "plain": plain}


class Case:
    """Inputs of one size, identical in every process."""

    def __init__(self, num_tokens: int, vocab: int, hidden: int) -> None:
        torch.manual_seed(0)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        # Logits with the spread of a trained model.
        self.hidden = torch.randn(num_tokens, hidden, device=self.device, dtype=dtype).requires_grad_()
        self.weight = (3 * hidden**-0.5 * torch.randn(vocab, hidden, device=self.device)).to(dtype).requires_grad_()
        self.labels = torch.randint(0, vocab, (num_tokens,), device=self.device)
        self.checked = torch.randperm(num_tokens, device=self.device)[:NUM_CHECKED]
        self.d_log_probs = torch.zeros(num_tokens, device=self.device)
        self.d_log_probs[self.checked] = torch.randn(len(self.checked), device=self.device)

    def run(self, log_probs: LogProbs) -> Tensor:
        """Run forward and backward."""
        log_probs_T = log_probs(self.hidden, self.weight, self.labels)
        log_probs_T.backward(self.d_log_probs)  # type: ignore[no-untyped-call]
        return log_probs_T.detach()

    def errors(self, log_probs_T: Tensor) -> dict[str, float]:
        """Return the errors relative to float64, on the checked tokens."""
        assert self.hidden.grad is not None, "backward computed no gradient of the hidden states"
        assert self.weight.grad is not None, "backward computed no gradient of the weight"
        hidden = self.hidden.detach()[self.checked].double().requires_grad_()
        weight = self.weight.detach().double().requires_grad_()
        expected = torch.log_softmax(hidden @ weight.t(), dim=-1)
        expected = expected.gather(1, self.labels[self.checked].unsqueeze(1)).squeeze(1)
        expected.backward(self.d_log_probs[self.checked].double())  # type: ignore[no-untyped-call]
        return {
            "error": _relative(log_probs_T[self.checked], expected.detach()),
            "d_hidden_error": _relative(self.hidden.grad[self.checked], hidden.grad),
            "d_weight_error": _relative(self.weight.grad, weight.grad),
        }


def _relative(actual: Tensor, expected: Tensor | None) -> float:
    assert expected is not None, "the reference has no gradient"
    return float((actual - expected).abs().max() / expected.abs().max())


def measure(name: str, num_tokens: int, vocab: int, hidden: int) -> dict[str, float] | None:
    """Run once in this process; return None if it does not fit."""
    unlimited = resource.getrlimit(resource.RLIMIT_AS)
    if not torch.cuda.is_available():
        resource.setrlimit(resource.RLIMIT_AS, (_status_bytes("VmSize") + CPU_LIMIT_BYTES, unlimited[1]))
    Case(64, 1000, hidden).run(CANDIDATES[name])  # start threads and load libraries
    try:
        case = Case(num_tokens, vocab, hidden)
        gradients = case.hidden.nbytes + case.weight.nbytes
        before = _start_peak()
        begin = time.perf_counter()
        log_probs_T = case.run(CANDIDATES[name])
        peak = _peak_bytes()  # also waits for a GPU
        seconds = time.perf_counter() - begin
    except RuntimeError as error:
        if "allocate" in str(error) or "out of memory" in str(error):
            return None
        raise
    resource.setrlimit(resource.RLIMIT_AS, unlimited)
    return {"seconds": seconds, "extra_bytes": peak - before - gradients, **case.errors(log_probs_T)}


def _start_peak() -> int:
    """Return the current memory, and start to measure the peak."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def _peak_bytes() -> int:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    return _status_bytes("VmHWM")


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def in_child(name: str, num_tokens: int, vocab: int, hidden: int) -> dict[str, float] | None:
    """Run `measure` in a child process."""
    command = [sys.executable, __file__, "--hidden", str(hidden), "--measure", name, str(num_tokens), str(vocab)]
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    measured: dict[str, float] | None = json.loads(finished.stdout.splitlines()[-1])
    return measured


def compare(bench: Benchmark, num_tokens: int, vocab: int, hidden: int, repeats: int) -> dict[str, Any]:
    """Add one row: both candidates in turns, with medians of their measurements."""
    measured: dict[str, list[dict[str, float] | None]] = {name: [] for name in CANDIDATES}
    order = list(CANDIDATES)
    for _ in range(repeats):
        for name in order:
            if None not in measured[name]:  # it would not fit the next time
                measured[name].append(in_child(name, num_tokens, vocab, hidden))
        order.reverse()
    row: dict[str, Any] = {"tokens": num_tokens, "vocab": vocab, "hidden": hidden}
    for name, runs in measured.items():
        fitting = [run for run in runs if run is not None]
        if len(fitting) < len(runs):
            row[f"{name}_s"] = "does not fit"
            continue
        row |= Timing(tuple(run["seconds"] for run in fitting)).columns(name)
        row[f"{name}_extra_MiB"] = max(run["extra_bytes"] for run in fitting) / MIB
        row |= {f"{name}_{key}": value for key, value in fitting[0].items() if key.endswith("error")}
    if "plain_extra_MiB" in row:
        row["memory_ratio"] = row["ours_extra_MiB"] / row["plain_extra_MiB"]
        row["time_ratio"] = row["ours_s"] / row["plain_s"]
    bench.row(**row)
    return row


def main() -> int:
    """Measure all sizes, or one. The size with goals is repeated."""
    arguments = parser("Log-probs in tiles compared with plain log_softmax.")
    arguments.add_argument("--quick", action="store_true", help="only {} tokens, {} words".format(*QUICK))
    arguments.add_argument("--hidden", type=int, default=1024)
    arguments.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.measure:
        name, num_tokens, vocab = options.measure
        print(json.dumps(measure(name, int(num_tokens), int(vocab), options.hidden)))
        return 0
    bench = Benchmark("logprob")
    with_goals = QUICK if options.quick else GOAL
    errors: list[float] = []
    for size in [QUICK] if options.quick else product(TOKENS, VOCABULARIES):
        row = compare(bench, *size, options.hidden, options.repeats if size == with_goals else 1)
        if size == with_goals:
            # If plain log_softmax does not fit, there is nothing to compare with.
            bench.goal("extra memory, ours over plain", row.get("memory_ratio", float("nan")), at_most=0.1)
            bench.goal("time, ours over plain", row.get("time_ratio", float("nan")), at_most=1.3)
        if "ours_error" in row:
            errors += [row[f"ours_{name}"] for name in ("error", "d_hidden_error", "d_weight_error")]
    bench.goal("largest error of log-probs and gradients", max(errors), at_most=TOLERANCE)
    return bench.finish(options)


if __name__ == "__main__":
    sys.exit(main())
