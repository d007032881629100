"""Results of benchmarks for each algorithm: differences from its formula and from peers, and the accuracy reached."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mrl.config.catalog import Algorithm

STORED = Path(__file__).with_name("proofs.json")
"""Written by `make docs` from benchmarks/results."""


@dataclass(frozen=True)
class Proof:
    differences: Mapping[str, float]
    """Largest difference from the formula in plain float64 loops (`formula`), and from the functions of a peer, by its
    name."""
    num_runs: int
    """Number of runs of three steps in the real trainer that were compared with an independent step."""
    step_difference: float | None
    """Largest difference in these runs."""
    scores: Sequence[float]
    """Accuracy on the demo's task after training, one of each seed."""

    def lines(self) -> Iterator[str]:
        parts = [f"{name} {shown(difference)}" for name, difference in self.differences.items()]
        if self.step_difference is not None:
            parts.append(f"{self.num_runs} runs of three steps {shown(self.step_difference)}")
        if parts:
            yield f"largest differences: {', '.join(parts)}"
        if self.scores:
            yield f"demo's task: {self.score()}"

    def score(self) -> str:
        """Return the mean of the scores, with their range if there are several seeds."""
        mean = f"{100 * sum(self.scores) / len(self.scores):.1f} %"
        if len(self.scores) == 1:
            return f"{mean} (1 seed)"
        low, high = (100 * end(self.scores) for end in (min, max))
        return f"{mean} ({low:.1f} to {high:.1f}, {len(self.scores)} seeds)"


def shown(difference: float) -> str:
    return f"{difference:.0e}" if difference else "0"


@cache
def _stored() -> dict[str, Proof]:
    return {key: Proof(**values) for key, values in json.loads(STORED.read_text(encoding="utf-8")).items()}


def find_proof(algorithm: Algorithm) -> Proof | None:
    """Return the stored proof. A user's own algorithm has none."""
    return _stored().get(key_of(algorithm))


def key_of(algorithm: Algorithm) -> str:
    return f"{algorithm.kind} {algorithm.names[0]}"
