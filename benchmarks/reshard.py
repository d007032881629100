"""Weights from every training layout into every engine layout: traffic compared with the possible minimum.

    python benchmarks/reshard.py                # real ranks over gloo, small models, every layout of 4 or 8 ranks
    python benchmarks/reshard.py --quick        # one row of each kind
    python benchmarks/reshard.py --plan-only    # published models on real clusters: bytes by link, least seconds

The workers have no engine and run in a thread of each rank: they receive, copy and answer with digests like vLLM's
workers, and every bit is compared with the model's file. `gather` is the method of other trainers. It alternates with
mrl's method on four ranks and for engines of two ranks: once with the same verification, and once, as they do it,
without. For small models the number of messages and calls dominates; for the larger one, bytes count, too.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Benchmark, parser
from benchmarks.reshard_plans import plan_rows
from benchmarks.reshard_ranks import RankOutcome, ReshardCase, measure
from mrl.config.schema import ParallelConfig
from mrl.models.rollout_table import EngineSizes
from mrl.verify.spawn import run_distributed
from tests.models.tiny_models import CONFIGS, SIZES

WORLD_LIMIT_S = 1200.0
CELLS_PER_WORLD = 32
BUCKET_BYTES = 1 << 20
SHAPE: dict[str, Any] = {
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
LARGER: dict[str, Any] = {
    "vocab_size": 8000,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 12,
}
LARGER_BUCKET_BYTES = 16 << 20
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("llama", {}),
    "tied": ("qwen2", {}),
    "moe": ("qwen3_moe", {"num_experts": 16, "moe_intermediate_size": 32, "mlp_only_layers": [], "head_dim": 8}),
    "dense 42M": ("llama", LARGER),
}


@dataclass(frozen=True)
class Cell:
    """One line of the table."""

    model: str
    num_ranks: int
    case: ReshardCase

    @property
    def training(self) -> str:
        """Training layout as text."""
        at = self.case.parallel
        sizes = {"tp": at.tp, "pp": at.pp, "vpp": at.vpp, "ep": at.ep, "dp": self.num_ranks // (at.tp * at.pp)}
        return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "1"

    @property
    def rollout(self) -> str:
        """Layout of the engines as text."""
        sizes = self.case.sizes
        return f"tp{sizes.tp}" + (" ep" if sizes.ep > 1 else "")


def make_model(name: str, directory: Path) -> Path:
    """Create a random model whose norms are not all ones."""
    family, overrides = MODELS[name]
    kind, settings = CONFIGS[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(kind(**{**SIZES, **settings, **SHAPE, **overrides}), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(directory / name)
    return directory / name


def layouts(num_ranks: int, moe: bool) -> Iterator[ParallelConfig]:
    """Yield every training layout of that many ranks, with at most four tensor ranks, four stages and two copies."""
    for tp in (1, 2, 4):
        for pp in (1, 2, 4):
            dp = num_ranks // (tp * pp)
            if tp * pp * dp != num_ranks or dp > 2:
                continue
            for vpp in (1, 2) if pp > 1 else (1,):
                for ep in (1, 2) if moe else (1,):
                    if num_ranks // pp % ep == 0:
                        yield ParallelConfig(tp=tp, pp=pp, vpp=vpp, ep=ep)


def cells(models: dict[str, Path], sockets: Path, repeats: int) -> Iterator[Cell]:
    """Yield the whole table."""
    for name, model in models.items():
        moe, larger = name == "moe", name == "dense 42M"
        bucket_bytes = LARGER_BUCKET_BYTES if larger else BUCKET_BYTES
        engines = [EngineSizes(2)] if larger else [EngineSizes(tp) for tp in (1, 2, 4)]
        engines += [EngineSizes(tp, tp) for tp in (2, 4)] if moe else []
        for num_ranks in (4,) if larger else (4, 8):
            for parallel in layouts(num_ranks, moe):
                for sizes in engines if not larger or parallel.vpp == 1 else ():
                    case = ReshardCase(str(model), parallel, sizes, bucket_bytes, str(sockets), repeats=repeats)
                    yield Cell(name, num_ranks, case)


def with_gather(cell: Cell) -> Cell:
    """Return the cell with the `gather` method as a comparison."""
    return Cell(cell.model, cell.num_ranks, ReshardCase(**{**vars(cell.case), "gather": True}))


def with_megatron(cell: Cell) -> Cell:
    """Return the cell with weights in Megatron's own parameters."""
    return Cell(f"{cell.model} in Megatron", cell.num_ranks, ReshardCase(**{**vars(cell.case), "megatron": True}))


def chosen(all_cells: list[Cell], quick: bool) -> list[Cell]:
    """Return the cells to run: all, or one of each kind; a few with Megatron's own models."""
    dense = [cell for cell in all_cells if cell.num_ranks == 4 and cell.case.sizes == EngineSizes(2)]
    megatron = [with_megatron(cell) for cell in dense if cell.case.parallel.pp == 2 and cell.model != "dense 42M"]
    if quick:
        return [with_gather(cell) for cell in dense if cell.model != "dense 42M" or cell.case.parallel.pp == 2]
    # Eight ranks and their workers on a machine with few cores would measure its scheduler.
    timed = [cell.num_ranks == 4 and cell.case.sizes.tp == 2 for cell in all_cells]
    return [
        *(with_gather(cell) if is_timed else cell for cell, is_timed in zip(all_cells, timed, strict=True)),
        *megatron,
    ]


def run(todo: list[Cell]) -> Iterator[tuple[Cell, list[RankOutcome]]]:
    """Run all cells, many in one world, and print the progress."""
    for size in sorted({cell.num_ranks for cell in todo}):
        cells_of_size = [cell for cell in todo if cell.num_ranks == size]
        for first in range(0, len(cells_of_size), CELLS_PER_WORLD):
            batch = cells_of_size[first : first + CELLS_PER_WORLD]
            print(f"{size} ranks, {first} of {len(cells_of_size)} rows done", file=sys.stderr, flush=True)
            by_rank = run_distributed(size, measure, [cell.case for cell in batch], timeout_s=WORLD_LIMIT_S)
            yield from zip(batch, (list(ranks) for ranks in zip(*by_rank, strict=True)), strict=True)


def row_of(cell: Cell, ranks: list[RankOutcome]) -> dict[str, Any]:
    """Return a line: totals over the ranks, the largest extra memory, and median seconds."""
    reports = [outcome.report for outcome in ranks if outcome.report is not None]
    wrong = [name for outcome in ranks for name in outcome.wrong] + [o.error for o in ranks if o.error]
    received, least = (sum(getattr(report, name) for report in reports) for name in ("bytes_received", "least_bytes"))
    row = {
        "model": cell.model,
        "training": cell.training,
        "ranks": cell.num_ranks,
        "rollout": cell.rollout,
        "bytes": received,
        "least_bytes": least,
        "ratio": received / least if least else 1.0,
        "transfers": sum(report.num_transfers for report in reports),
        "extra_buckets": max(report.extra_bytes for report in reports) / cell.case.bucket_bytes,
        "wrong_tensors": len(wrong),
        "seconds": statistics.median(ranks[0].seconds),
    }
    if cell.case.gather:
        proven_s, unproven_s = (statistics.median(ranks[0].gather_seconds[proven]) for proven in (True, False))
        row |= {
            "gather_bytes": sum(outcome.gather_bytes for outcome in ranks),
            "gather_s": proven_s,
            "gather_unproven_s": unproven_s,
            "speedup": proven_s / row["seconds"],
            "speedup_unproven": unproven_s / row["seconds"],
        }
    return row


def measured(bench: Benchmark, quick: bool, repeats: int) -> None:
    """Measure with real ranks."""
    with tempfile.TemporaryDirectory() as directory:
        models = {name: make_model(name, Path(directory)) for name in MODELS}
        for cell, ranks in run(chosen(list(cells(models, Path(directory), repeats)), quick)):
            bench.row(**row_of(cell, ranks))
    for name, most in (("ratio", 1.05), ("extra_buckets", 2), ("wrong_tensors", 0)):
        bench.goal(f"largest {name}", max(row[name] for row in bench.rows), at_most=most)
    split = [row for row in bench.rows if "speedup" in row and {"pp", "ep"} & _axes(row["training"])]
    for column, how in (("speedup", "with the same proof"), ("speedup_unproven", "of which nothing is proven")):
        values = [row[column] for row in split]
        bench.goal(
            f"least speedup over gathering everything, {how}, where pp or ep is above 1", min(values), at_least=3
        )
        print(f"median of these speedups: {statistics.median(values):.3g}")


def _axes(layout: str) -> set[str]:
    return {axis.rstrip("0123456789") for axis in layout.split()}


def planned(bench: Benchmark) -> None:
    """Plan published models, without processes."""
    began = time.perf_counter()
    for row in plan_rows():
        bench.row(**row)
    bench.goal("largest ratio", max(row["ratio"] for row in bench.rows), at_most=1.05)
    print(f"planned in {time.perf_counter() - began:.0f} s, one rank after another")


def main() -> int:
    """Measure or plan, and report."""
    options = parser("Weights from every training layout into every engine layout.")
    options.set_defaults(repeats=3)
    options.add_argument("--quick", action="store_true", help="one row of each kind")
    options.add_argument("--plan-only", action="store_true", help="published models on real clusters, by arithmetic")
    arguments: argparse.Namespace = options.parse_args()
    bench = Benchmark("reshard_plans" if arguments.plan_only else "reshard")
    if arguments.plan_only:
        planned(bench)
    else:
        measured(bench, arguments.quick, arguments.repeats)
    return bench.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())
