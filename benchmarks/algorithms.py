"""Compare mrl's algorithms with their formulas, and with verl's and TRL's functions, number by number.

    python benchmarks/algorithms.py [--json FILE] [--num-cases N]

Each peer has a separate environment under `.venv-peers/` (created on the first run, if a package index can be reached)
and runs in its own interpreter: random cases are sent as an .npz file, and results come back as one. Everything is
float64. mrl packs its rows, the peers pad theirs; the cases have observation tokens, and noise under every mask. The
exit status is 1 if a goal is missed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.algorithm_cases import Function, make_case, packed, padded
from benchmarks.algorithm_formulas import OF_MRL, write_answers
from benchmarks.algorithm_functions import OURS
from benchmarks.harness import Benchmark, parser
from benchmarks.peer_environments import RUN_TIMEOUT_S, TRL, VERL, PeerEnvironment

TOLERANCE = 1e-6
MIN_FUNCTIONS = 90

INTENDED_DIFFERENCES = (
    "group of one: advantage 0 in mrl; verl returns the raw score (0 in its vectorized RLOO)",
    "GPG's factor: rows in groups with different scores in mrl, as in the paper; verl counts rows with nonzero scores",
    "fully masked rows: not counted in mrl; verl's GMPO and TRL's grpo count them as rows",
    "seq-mean-token-sum-norm: the constant is required in mrl; verl falls back to the padded width",
    "NaN or missing rewards, rewards on observation tokens: errors in mrl; verl keeps NaN, TRL makes it 0",
    "TRL divides by std + 1e-4 in GRPO, mrl and verl by std + 1e-6 (TRL's is inside its trainer: std compared alone)",
    "TRL has no bounds for ratios and k3; mrl and verl keep log-ratios within 20 (GSPO's below 10) and k3 below 10",
    "GMPO's rollout weights: per token in mrl; verl uses the row's geometric mean",
    "Clip-Cov and KL-Cov: covariances of old log-probs over the update in mrl; verl's are of new ones, as given here",
    "Clip-Cov: may choose tokens that PPO clips in mrl, not in verl: only gradients are compared",
    "optimal token baseline: advantage 0 where one row is left in mrl; by default verl's baseline is 0 there",
)


PEERS = (VERL, TRL)


def compute(peer: PeerEnvironment, subject: str, cases: Path, results: Path) -> str:
    """Compute a peer's results on the cases of a subject such as "algorithms". Return the error, or an empty text."""
    script = Path(__file__).parent / "peers" / f"{peer.name}_{subject}.py"
    return peer.install() or peer.run(RUN_TIMEOUT_S, str(script), str(cases), str(results))


def write_cases(cases: list[dict[str, Any]], path: Path) -> None:
    """Write all cases to one file: arrays unchanged, everything else as JSON."""
    stored: dict[str, Any] = {"num_cases": np.asarray(len(cases))}
    for number, case in enumerate(cases):
        arrays = {name: value for name, value in case.items() if isinstance(value, np.ndarray)}
        stored |= {f"{number}/{name}": value for name, value in arrays.items()}
        settings = {name: value for name, value in case.items() if name not in arrays}
        stored[f"{number}/settings"] = np.asarray(json.dumps(settings))
    np.savez(path, **stored)


def at_least_one(expected: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the scale of the differences: the expected magnitude, at least 1."""
    return np.asarray(np.maximum(1.0, np.abs(expected)))


def compare(
    ours_of: Mapping[str, Function],
    cases: list[dict[str, Any]],
    results_path: Path,
    scale: Callable[[NDArray[np.float64]], NDArray[np.float64]] = at_least_one,
) -> list[dict[str, Any]]:
    """Return one row per function of the peer, with the largest difference over all cases and outputs."""
    theirs = np.load(results_path, allow_pickle=False)
    names = dict.fromkeys(key.split("/")[1] for key in theirs.files)
    rows = []
    for name in names:
        worst, outputs = 0.0, set()
        for number, case in enumerate(cases):
            ours = ours_of[name](packed(case))
            for key in (key for key in theirs.files if key.startswith(f"{number}/{name}/")):
                output = key.split("/", 2)[2]
                expected = theirs[key]
                actual = padded(case, ours[output], expected.shape)
                difference = np.abs(actual - expected) / scale(expected)
                worst = max(worst, float(np.nan_to_num(difference, nan=np.inf).max(initial=0.0)))
                outputs.add(output)
        rows.append({"function": name, "max_difference": worst, "outputs": " ".join(sorted(outputs))})
    return rows


def main() -> int:
    """Run the available peers, compare, print the results, and return the exit status."""
    arguments_parser = parser("Compare mrl's algorithms with verl's and TRL's, number by number.")
    arguments_parser.add_argument("--num-cases", type=int, default=40, help="random cases per function (default 40)")
    arguments = arguments_parser.parse_args()
    bench = Benchmark("algorithms")
    cases = [make_case(seed) for seed in range(arguments.num_cases)]
    compared: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        write_answers(cases, Path(folder, "formulas.npz"))
        compared += [{"peer": "formula", **row} for row in compare(OF_MRL, cases, Path(folder, "formulas.npz"))]
        write_cases(cases, Path(folder, "cases.npz"))
        for peer in PEERS:
            results = Path(folder, f"{peer.name}.npz")
            if failed := compute(peer, "algorithms", Path(folder, "cases.npz"), results):
                bench.row(peer=peer.name, function="NONE COULD RUN", outputs=failed)
            else:
                compared += [{"peer": peer.name, **row} for row in compare(OURS[peer.name], cases, results)]
    for row in compared:
        bench.row(**row)
    print("Intended differences, which the cases avoid:", *INTENDED_DIFFERENCES, sep="\n  - ")
    bench.goal("functions and variants compared", len(compared), at_least=MIN_FUNCTIONS)
    if compared:
        bench.goal("largest difference", max(row["max_difference"] for row in compared), at_most=TOLERANCE)
    return bench.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())
