"""Every family in every layout, compared with transformers and with the one-rank run.

    python benchmarks/parity.py            # the table, and the faults that it must detect
    python benchmarks/parity.py --quick    # two families

Columns: log-probs (values for a score head) compared with transformers, as the largest absolute difference in float32;
then, compared with one rank, relative differences of loss and gradient norm of three updates, and absolute differences
of the parameters after them. Each layout is run with micro-batches of two sizes, and the worse result is shown.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Benchmark, parser
from benchmarks.parity_faults import FAULTS, measure_with_fault
from mrl.config.schema import ParallelConfig as Layout
from mrl.models.families import read_spec
from mrl.models.table import Head
from mrl.verify.parity import Difference, ParityCase, ParityResult, measure, merge_ranks, transformers_scores
from mrl.verify.spawn import run_distributed
from tests.models.tiny_models import MOE_FAMILIES, TINY_FAMILIES, make_tiny

BUDGETS = (64, 1000)
SCORES_GOAL, RELATIVE_GOAL = 2e-5, 1e-5
WORLD_LIMIT_S = 900.0

DENSE = {
    "tp2": (2, Layout(tp=2)),
    "tp2 sp": (2, Layout(tp=2, sequence_parallel=True)),
    "pp2": (2, Layout(pp=2)),
    "pp2 3+1": (2, Layout(pp=2, first_stage_layers=3)),
    "pp2 vpp2": (2, Layout(pp=2, vpp=2)),
    "cp2": (2, Layout(cp=2)),
    "dp2": (2, Layout()),
    "tp4": (4, Layout(tp=4)),
    "tp2 pp2": (4, Layout(tp=2, pp=2)),
    "tp2 sp cp2": (4, Layout(tp=2, cp=2, sequence_parallel=True)),
}
MOE = {
    "tp2 sp": (2, Layout(tp=2, sequence_parallel=True)),
    "pp2": (2, Layout(pp=2)),
    "pp2 vpp2": (2, Layout(pp=2, vpp=2)),
    "cp2": (2, Layout(cp=2)),
    "dp2": (2, Layout()),
    "ep2": (2, Layout(ep=2)),
    "tp2 etp2 sp": (2, Layout(tp=2, etp=2, sequence_parallel=True)),
    "tp2 sp pp2": (4, Layout(tp=2, pp=2, sequence_parallel=True)),
    "tp2 sp ep2": (4, Layout(tp=2, ep=2, sequence_parallel=True)),
    "pp2 ep2": (4, Layout(pp=2, ep=2)),
}


@dataclass(frozen=True)
class Cell:
    """One line of the table: a model in a layout."""

    family: str
    head: Head
    layout: str
    num_ranks: int
    cases: tuple[ParityCase, ...]


def cells_of(family: str, head: Head, model: Path) -> list[Cell]:
    """Return the layouts of one model, one rank first."""
    layouts = {"1": (1, Layout())} | (MOE if family in MOE_FAMILIES else DENSE)
    if read_spec(model).gdn:  # linear attention reads the tokens of a row in order
        layouts = {name: (ranks, layout) for name, (ranks, layout) in layouts.items() if layout.cp == 1}
    return [
        Cell(family, head, name, ranks, tuple(ParityCase(str(model), head, layout, budget) for budget in BUDGETS))
        for name, (ranks, layout) in layouts.items()
        if family != "gpt_oss" or layout.etp == 1  # refused
    ]


def run_cells(cells: list[Cell]) -> dict[tuple[str, str, str], list[ParityResult]]:
    """Run every case, with one world per number of ranks."""
    results_by_layout: dict[tuple[str, str, str], list[ParityResult]] = {}
    for size in sorted({cell.num_ranks for cell in cells}):
        cells_of_size = [cell for cell in cells if cell.num_ranks == size]
        cases = [case for cell in cells_of_size for case in cell.cases]
        by_rank = run_distributed(size, measure, cases, timeout_s=WORLD_LIMIT_S)
        results = iter([merge_ranks(list(ranks)) for ranks in zip(*by_rank, strict=True)])
        for cell in cells_of_size:
            results_by_layout[cell.family, cell.head, cell.layout] = [next(results) for _ in cell.cases]
    return results_by_layout


def worst(one: ParityResult, results: list[ParityResult]) -> Difference:
    """Return the larger of each difference over the budgets."""
    differences = [Difference.between(one, result) for result in results]
    names = Difference.__dataclass_fields__
    return Difference(**{name: max(getattr(difference, name) for difference in differences) for name in names})


def table(bench: Benchmark, models: dict[tuple[str, Head], Path]) -> None:
    """Measure and report every model in every layout."""
    cells = [cell for (family, head), model in models.items() for cell in cells_of(family, head, model)]
    results_by_layout = run_cells(cells)
    for cell in cells:
        results, one = (
            results_by_layout[cell.family, cell.head, cell.layout],
            results_by_layout[cell.family, cell.head, "1"][0],
        )
        oracle = transformers_scores(models[cell.family, cell.head], cell.cases[0])
        against_oracle = max(float(np.abs(result.scores - oracle).max()) for result in results)
        difference = worst(one, results)
        bench.row(
            model=cell.family + (" value" if cell.head == "score" else ""),
            layout=cell.layout,
            transformers=against_oracle,
            loss=difference.loss,
            grad_norm=difference.grad_norm,
            parameters=difference.parameters,
        )
    largest = {name: max(row[name] for row in bench.rows) for name in ("transformers", "loss", "grad_norm")}
    bench.goal("largest difference from transformers", largest["transformers"], at_most=SCORES_GOAL)
    for name in ("loss", "grad_norm"):
        bench.goal(f"largest relative difference of {name}", largest[name], at_most=RELATIVE_GOAL)


def faults(bench: Benchmark, directory: Path) -> None:
    """Seed each fault: its layout must miss the goals of the table."""
    missed = []
    for name, fault in FAULTS.items():
        model = make_tiny(fault.family, directory / f"fault-{name.replace(' ', '-')}", 0, fault.head)
        whole = ParityCase(str(model), fault.head, Layout(), BUDGETS[0])
        one = run_distributed(1, measure, [whole], timeout_s=WORLD_LIMIT_S)
        case = ParityCase(str(model), fault.head, fault.layout, BUDGETS[0])
        ranks = run_distributed(fault.num_ranks, measure_with_fault, name, case, timeout_s=WORLD_LIMIT_S)
        result = merge_ranks(ranks)
        difference = Difference.between(merge_ranks([one[0][0]]), result)
        oracle = float(np.abs(result.scores - transformers_scores(model, case)).max())
        caught = oracle > SCORES_GOAL or max(difference.loss, difference.grad_norm) > RELATIVE_GOAL
        missed += [] if caught else [name]
        print(
            f"fault: {name:48} transformers {oracle:.1e} loss {difference.loss:.1e} "
            f"grad_norm {difference.grad_norm:.1e}  {'caught' if caught else 'MISSED'}",
            flush=True,
        )
    bench.goal("seeded faults that nobody noticed", len(missed), at_most=0)


def main() -> int:
    """Build the tiny models, measure, and report."""
    options = parser("Every family in every layout, against transformers and one rank.")
    options.add_argument("--quick", action="store_true", help="two families, no faults")
    arguments = options.parse_args()
    bench = Benchmark("parity")
    with tempfile.TemporaryDirectory() as directory:
        families = ("qwen3", "mixtral") if arguments.quick else TINY_FAMILIES
        models: dict[tuple[str, Head], Path] = {
            (family, "lm"): make_tiny(family, Path(directory, family)) for family in families
        }
        if not arguments.quick:
            models["llama", "score"] = make_tiny("llama", Path(directory, "llama-score"), 0, "score")
        table(bench, models)
        if not arguments.quick:
            faults(bench, Path(directory))
    return bench.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())
