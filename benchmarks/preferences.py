"""Compare mrl's losses of pairs and divergences from a teacher with TRL's, number by number.

    python benchmarks/preferences.py [--json FILE] [--num-cases N]

This works like `algorithms.py` for RL. TRL runs in a separate environment, on random cases: ragged responses with
tokens from others, noise under every mask, several pairs, and settings of all sizes. Losses, metrics, and gradients
with respect to each log-prob, score or logit are compared, relative to the largest number of each. Everything is
float64 except TRL's odds ratios. The exit status is 1 if a goal is missed.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.algorithms import TOLERANCE, compare, compute, write_cases
from benchmarks.harness import Benchmark, parser
from benchmarks.peer_environments import TRL
from benchmarks.preference_cases import OURS, make_case

MIN_FUNCTIONS = 25

INTENDED_DIFFERENCES = (
    "TRL's ipo is mrl's ipo_mean, its sigmoid_norm is sigmoid with average; ipo_sum is its CPO's function of sums",
    "rewards and accuracy of ipo and sigmoid_norm: of means in mrl, like the loss; TRL's DPOTrainer reports sums",
    "conservative DPO: TRL's aot and aot_unpaired of a single pair; with several pairs they sort the batch",
    "ORPO's likelihood: of the response's tokens in mrl; TRL adds the prompt's",
    "ORPO's odds ratio: float32 in TRL, so that small reward margins are rounding errors and not compared",
    "a tie counts half in mrl's accuracy; TRL counts it as wrong",
    "log_prob/chosen and /rejected: per token in mrl; TRL reports those of responses",
    "NaN under a mask: harmless in mrl; TRL's CPO and ORPO multiply it by 0, which gives NaN",
)


def largest(expected: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the scale of the differences: the largest number of an output, or 1 if all are 0."""
    return np.asarray(np.abs(expected).max() or 1.0)


def main() -> int:
    """Run TRL, compare, print the results, and return the exit status."""
    arguments_parser = parser("Compare mrl's losses of pairs and divergences from a teacher with TRL's.")
    arguments_parser.add_argument("--num-cases", type=int, default=40, help="random cases per function (default 40)")
    arguments = arguments_parser.parse_args()
    bench = Benchmark("preferences")
    cases = [make_case(seed) for seed in range(arguments.num_cases)]
    compared = []
    with tempfile.TemporaryDirectory() as folder:
        written, results = Path(folder, "cases.npz"), Path(folder, "trl.npz")
        write_cases(cases, written)
        if failed := compute(TRL, "preferences", written, results):
            bench.row(function="NONE COULD RUN", outputs=failed)
        else:
            compared = compare(OURS, cases, results, largest)
    for row in compared:
        bench.row(**row)
    print("Intended differences, which the cases avoid:", *INTENDED_DIFFERENCES, sep="\n  - ")
    bench.goal("functions and variants compared", len(compared), at_least=MIN_FUNCTIONS)
    if compared:
        bench.goal("largest relative difference", max(row["max_difference"] for row in compared), at_most=TOLERANCE)
    return bench.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())
