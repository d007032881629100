"""Weights from every training layout into every engine layout: bytes that crossed against the least that had to.

    python benchmarks/reshard.py                # real ranks over gloo, small models, every layout that fits 4 or 8
    python benchmarks/reshard.py --quick        # one row of each kind
    python benchmarks/reshard.py --plan-only    # published models on real clusters: bytes by link, seconds they allow

The workers are stand-ins without an engine, on a thread of each rank: they take what is handed over as vLLM's workers
do, copy it, and answer with digests, and every bit is compared with the model's file. `gather` is the way that other
trainers take, timed in turns with ours, on four ranks and for engines of two: with the same proof of arrival, and as
they have it, without any. Of the small models it is the number of messages and calls that takes the time; of the larger
one also the bytes.
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
        """The training layout in words."""
        at = self.case.parallel
        sizes = {"tp": at.tp, "pp": at.pp, "vpp": at.vpp, "ep": at.ep, "dp": self.num_ranks // (at.tp * at.pp)}
        return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "1"

    @property
    def rollout(self) -> str:
        """The engines' layout in words."""
        sizes = self.case.sizes
        return f"tp{sizes.tp}" + (" ep" if sizes.ep > 1 else "")


def make_model(name: str, directory: Path) -> Path:
    """A random model whose norms are not all ones."""
    family, own = MODELS[name]
    kind, settings = CONFIGS[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(kind(**{**SIZES, **settings, **SHAPE, **own}), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(directory / name)
    return directory / name


def layouts(num_ranks: int, moe: bool) -> Iterator[ParallelConfig]:
    """Every training layout of that many ranks with at most four tensor ranks and four stages, and two copies."""
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
    """The whole table: tensors of the right names, and at its end some rows with real Megatron models."""
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
    """The same, beside the way that gathers everything."""
    return Cell(cell.model, cell.num_ranks, ReshardCase(**{**vars(cell.case), "gather": True}))


def with_megatron(cell: Cell) -> Cell:
    """The same, with weights that sit in Megatron's own parameters."""
    return Cell(f"{cell.model} in Megatron", cell.num_ranks, ReshardCase(**{**vars(cell.case), "megatron": True}))


def chosen(everything: list[Cell], quick: bool) -> list[Cell]:
    """What is run: all of it, or a row of each kind; Megatron's own models in a few rows."""
    dense = [cell for cell in everything if cell.num_ranks == 4 and cell.case.sizes == EngineSizes(2)]
    megatron = [with_megatron(cell) for cell in dense if cell.case.parallel.pp == 2 and cell.model != "dense 42M"]
    if quick:
        return [with_gather(cell) for cell in dense if cell.model != "dense 42M" or cell.case.parallel.pp == 2]
    # Eight ranks and their workers on a machine of few cores would time its scheduler.
    timed = [cell.num_ranks == 4 and cell.case.sizes.tp == 2 for cell in everything]
    return [
        *(with_gather(cell) if is_timed else cell for cell, is_timed in zip(everything, timed, strict=True)),
        *megatron,
    ]


def run(todo: list[Cell]) -> Iterator[tuple[Cell, list[RankOutcome]]]:
    """All cells, many in one world; says how far it is."""
    for size in sorted({cell.num_ranks for cell in todo}):
        mine = [cell for cell in todo if cell.num_ranks == size]
        for first in range(0, len(mine), CELLS_PER_WORLD):
            batch = mine[first : first + CELLS_PER_WORLD]
            print(f"{size} ranks, {first} of {len(mine)} rows done", file=sys.stderr, flush=True)
            by_rank = run_distributed(size, measure, [cell.case for cell in batch], timeout_s=WORLD_LIMIT_S)
            yield from zip(batch, (list(ranks) for ranks in zip(*by_rank, strict=True)), strict=True)


def row_of(cell: Cell, ranks: list[RankOutcome]) -> dict[str, Any]:
    """What a line says: totals over the ranks, but the largest of the extra memories, and medians of the seconds."""
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
        proven_s, believed_s = (statistics.median(ranks[0].gather_seconds[proven]) for proven in (True, False))
        row |= {
            "gather_bytes": sum(outcome.gather_bytes for outcome in ranks),
            "gather_s": proven_s,
            "gather_unproven_s": believed_s,
            "speedup": proven_s / row["seconds"],
            "speedup_unproven": believed_s / row["seconds"],
        }
    return row


def measured(bench: Benchmark, quick: bool, repeats: int) -> None:
    """Real ranks."""
    with tempfile.TemporaryDirectory() as directory:
        models = {name: make_model(name, Path(directory)) for name in MODELS}
        for cell, ranks in run(chosen(list(cells(models, Path(directory), repeats)), quick)):
            bench.row(**row_of(cell, ranks))
    for name, most in (("ratio", 1.05), ("extra_buckets", 2), ("wrong_tensors", 0)):
        bench.goal(f"largest {name}", max(row[name] for row in bench.rows), at_most=most)
    split = [row for row in bench.rows if "speedup" in row and {"pp", "ep"} & _axes(row["training"])]
    for column, how in (("speedup", "with the same proof"), ("speedup_unproven", "of which nothing is proven")):
        found = [row[column] for row in split]
        bench.goal(f"least speedup over gathering everything, {how}, where pp or ep is above 1", min(found), at_least=3)
        print(f"median of these speedups: {statistics.median(found):.3g}")


def _axes(layout: str) -> set[str]:
    return {axis.rstrip("0123456789") for axis in layout.split()}


def planned(bench: Benchmark) -> None:
    """Published models, without a process."""
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
