"""Comparison of an mrl step with an independent one: the largest difference of every quantity, by option.

    python benchmarks/reference.py [--json FILE] [--quick]

The real trainer, workers and Megatron run three steps on one and two ranks, with every pair of options. The other side
is `tests/reference/step.py`, plain torch in float64. Differences are relative to a quantity's size if that is above 1.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Benchmark, parser
from mrl.config.resolved.load import load_config
from mrl.verify.spawn import run_distributed
from tests.reference.compare import NORM_TOLERANCE, TOLERANCE, hold
from tests.reference.matrix import all_cases, record
from tests.reference.models import make_models
from tests.reference.rewards import FUNCTION

LIMIT_S = 900.0
COLUMNS = ("scores", "old_log_probs", "ref_log_probs", "values", "advantages", "returns")


def kind_of(quantity: str) -> str:
    """Return the table column of a quantity."""
    if quantity.startswith("metric ") or quantity == "scores":
        return "figures"
    if quantity in COLUMNS:
        return quantity
    return quantity.split()[-1].replace("lr", "rates").replace("kl_coef", "rates")


def in_effect(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options without estimators of a KL that the run does not have."""
    where, _, _ = options["kl"].partition(" ")
    used = {"in_reward": ("reward", "both"), "in_loss": ("loss", "both")}
    return {name: level for name, level in options.items() if where in used.get(name, (where,))}


def main() -> int:
    """Record, compare, and print the table."""
    arguments_parser = parser("Comparison of an mrl step with an independent one.")
    arguments_parser.add_argument("--quick", action="store_true", help="only the runs of `make test`")
    arguments = arguments_parser.parse_args()
    bench, largest = Benchmark("reference"), defaultdict[tuple[str, str], dict[str, float]](dict)
    num_runs: dict[tuple[str, str], int] = defaultdict(int)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_models(folder / "models")
        for part, (ranks, cases) in all_cases(folder / "models").items():
            if arguments.quick and not part.endswith("quick"):
                continue
            recordings = run_distributed(ranks, record, cases, temporary, timeout_s=LIMIT_S)[0]
            for case, recording in zip(cases, recordings, strict=True):
                config = dataclasses.asdict(load_config(str(folder / "rank-0" / f"{case.name}.yaml")).config)
                differences = hold(config, json.loads(recording), FUNCTION)
                for option, level in {"all": "", **in_effect(case.options)}.items():
                    num_runs[option, str(level)] += 1
                    differences_by_kind = largest[option, str(level)]
                    for quantity, value in differences.items():
                        differences_by_kind[kind_of(quantity)] = max(
                            differences_by_kind.get(kind_of(quantity), 0.0), value
                        )
            print(f"{part}: {len(cases)} runs", flush=True)
    for (option, level), differences_by_kind in sorted(largest.items()):
        bench.row(option=option, level=level, runs=num_runs[option, level], **dict(sorted(differences_by_kind.items())))
    norms = largest["all", ""].pop("grad_norm")
    bench.goal("largest difference", max(largest["all", ""].values()), at_most=TOLERANCE)
    bench.goal("largest difference of a gradient norm", norms, at_most=NORM_TOLERANCE)
    return bench.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())
