"""Random batches as plain lists, their packed form, and several ranks in one process."""

from __future__ import annotations

import math
import os
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor

from mrl.algos.groups import Outcomes
from mrl.algos.losses import PolicyTokens
from mrl.algos.rollout_correction import RolloutPair
from mrl.algos.rows import Rows

NUM_CASES = int(os.environ.get("MRL_ALGO_CASES", "1000"))
T = TypeVar("T")


@dataclass
class Case:
    """One batch. Every column is a list of rows; masked tokens hold NaN wherever a function may not look."""

    mask: list[list[bool]]
    columns: dict[str, list[list[float]]]
    scores: list[float]
    uids: list[str]
    baselines: list[float]
    rows: Rows = field(init=False)

    def __post_init__(self) -> None:
        self.rows = Rows.of([len(row) for row in self.mask])

    @property
    def mask_T(self) -> Tensor:
        return torch.tensor([token for row in self.mask for token in row], dtype=torch.bool)

    def column(self, name: str) -> Tensor:
        return torch.tensor([token for row in self.columns[name] for token in row], dtype=torch.float64)

    def written(self, name: str) -> list[list[float]]:
        """The column without its masked tokens: all that an oracle sees."""
        return [
            [value for value, kept in zip(values, mask, strict=True) if kept]
            for values, mask in zip(self.columns[name], self.mask, strict=True)
        ]

    @property
    def policy_tokens(self) -> PolicyTokens:
        log_probs_T = self.column("log_probs").requires_grad_()
        return PolicyTokens(self.rows, self.mask_T, log_probs_T, self.column("old"), self.column("advantages"))

    @property
    def pair(self) -> RolloutPair:
        return RolloutPair(self.rows, self.mask_T, self.column("log_probs"), self.column("rollout"))

    @property
    def outcomes(self) -> Outcomes:
        pairs = zip(self.written("old"), self.written("ref"), strict=True)
        moved = [math.fsum(old) - math.fsum(ref) for old, ref in pairs]
        scores_B, ratios_B = (torch.tensor(values, dtype=torch.float64) for values in (self.scores, moved))
        return Outcomes(scores_B, self.uids, self.rows.count(self.mask_T), log_ratios_B=ratios_B)


def make_case(seed: int) -> Case:
    """Ragged rows, empty rows, fully masked rows, observation tokens, scattered and single-row groups."""
    rng = random.Random(seed)
    mask = []
    for _ in range(rng.randint(2, 7)):
        written = rng.choice([0.0, 0.7, 0.7, 1.0, 1.0])
        mask.append([rng.random() < written for _ in range(rng.randint(0, 9))])
    columns: dict[str, list[list[float]]] = {}
    base = [[-abs(rng.gauss(0, 1)) for _ in row] for row in mask]
    columns["log_probs"] = base
    for name, scale in (("old", 0.3), ("ref", 1.0), ("rollout", 0.4)):
        columns[name] = [[x + rng.gauss(0, scale) * rng.choice([1, 1, 1, 9]) for x in row] for row in base]
    for name in ("advantages", "values", "old_values", "returns", "entropy"):
        columns[name] = [[rng.gauss(0, 1) * rng.choice([0, 1, 1, 1]) for _ in row] for row in mask]
    for rows in columns.values():
        for values, written_tokens in zip(rows, mask, strict=True):
            values[:] = [x if kept else math.nan for x, kept in zip(values, written_tokens, strict=True)]
    columns["rewards"] = [[rng.gauss(0, 1) if kept else 0.0 for kept in row] for row in mask]
    scores = [rng.choice([0.0, 0.5, 1.0, rng.gauss(0, 1)]) for _ in mask]
    uids = [rng.choice(["a", "b", "42", "0042"]) for _ in mask]
    uids[-1] = uids[0]  # at least one group has two rows
    baselines = [rng.gauss(0, 1) for _ in mask]
    columns["norms"] = [[rng.choice([0.0, rng.random(), 2.0]) if kept else math.nan for kept in row] for row in mask]
    return Case(mask, columns, scores, uids, baselines)


@lru_cache(maxsize=1)
def all_cases() -> list[Case]:
    return [make_case(seed) for seed in range(NUM_CASES)]


def take_rows(rows: Rows, chosen: list[int], *columns_T: Tensor) -> tuple[Rows, list[Tensor]]:
    """Some rows of a packed batch, in the given order, as a packed batch."""
    spans = [(int(rows.starts_B[i]), int(rows.starts_B[i] + rows.lengths_B[i])) for i in chosen]
    index = torch.tensor([t for start, end in spans for t in range(start, end)], dtype=torch.int64)
    return Rows.of([end - start for start, end in spans]), [column_T[index] for column_T in columns_T]


def on_ranks(work: Callable[[int, Callable[[Tensor], Tensor]], T], num_ranks: int) -> list[T]:
    """Run `work(rank, sum_over_ranks)` on so many threads; a rank that skips a reduction breaks the barrier."""
    barrier = threading.Barrier(num_ranks, timeout=10)
    sent: list[Tensor] = [torch.empty(0)] * num_ranks
    results: list[T | None] = [None] * num_ranks
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        def sum_over_ranks(x: Tensor) -> Tensor:
            sent[rank] = x
            barrier.wait()
            total = torch.stack(sent).sum(0)
            barrier.wait()
            return total

        try:
            results[rank] = work(rank, sum_over_ranks)
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results  # type: ignore[return-value]
