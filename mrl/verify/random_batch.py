"""Random batches in float64 that show whether a function of packed rows reads what it must not."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.algos.advantages import AdvantageInputs
from mrl.algos.groups import Outcomes
from mrl.algos.losses import PolicyTokens
from mrl.algos.rows import Reduce, Rows, identity

Row = list[float]


@dataclass(frozen=True)
class RandomBatch:
    """Rows of different length, one of them empty, with prompts of several samples. Masked tokens hold NaN."""

    mask: list[list[bool]]
    columns: Mapping[str, list[Row]]
    rewards: list[Row]
    scores: Row
    baselines: Row
    uids: list[str]

    @classmethod
    def of(cls, seed: int) -> RandomBatch:
        draw = random.Random(seed)
        lengths = [draw.randint(1, 9) for _ in range(draw.randint(2, 7))] + [0]
        mask = [[draw.random() < 0.8 for _ in range(length)] for length in lengths]
        old = [[-abs(draw.gauss(0, 1)) for _ in row] for row in mask]
        columns = {name: [[draw.gauss(0, 1) for _ in row] for row in mask] for name in ("advantages", "values")}
        columns["old_log_probs"] = old
        columns["log_probs"] = [[min(x + draw.gauss(0, 0.5), -1e-3) for x in row] for row in old]
        columns["score_norms"] = [[draw.choice([0.0, draw.random()]) for _ in row] for row in mask]
        for rows in columns.values():
            for row, kept in zip(rows, mask, strict=True):
                row[:] = [x if keep else math.nan for x, keep in zip(row, kept, strict=True)]
        rewards = [[draw.random() if keep else 0.0 for keep in row] for row in mask]
        uids = [draw.choice("abc") for _ in mask]
        uids[-1] = uids[0]  # at least one prompt has two samples
        scores = [draw.choice([0.0, 1.0, draw.random()]) for _ in mask]
        return cls(mask, columns, rewards, scores, [draw.random() for _ in mask], uids)

    def take(self, rows: Sequence[int]) -> RandomBatch:
        """Return some rows as a batch."""
        return RandomBatch(
            [self.mask[row] for row in rows],
            {name: [column[row] for row in rows] for name, column in self.columns.items()},
            [self.rewards[row] for row in rows],
            [self.scores[row] for row in rows],
            [self.baselines[row] for row in rows],
            [self.uids[row] for row in rows],
        )

    @property
    def rows(self) -> Rows:
        return Rows.of([len(row) for row in self.mask])

    @property
    def mask_T(self) -> Tensor:
        return torch.tensor([keep for row in self.mask for keep in row], dtype=torch.bool)

    def column(self, name: str) -> Tensor:
        return torch.tensor([x for row in self.columns[name] for x in row], dtype=torch.float64)

    def written(self, rows: list[Row]) -> list[Row]:
        """Return a column without its masked tokens, as an oracle gets it."""
        pairs = zip(rows, self.mask, strict=True)
        return [[x for x, keep in zip(row, kept, strict=True) if keep] for row, kept in pairs]

    @property
    def tokens(self) -> PolicyTokens:
        columns = [self.column(name).requires_grad_() for name in ("log_probs", "old_log_probs", "advantages")]
        return PolicyTokens(self.rows, self.mask_T, *columns)

    def inputs(self) -> AdvantageInputs:
        """Return the whole batch as the input of an advantage estimator, on one rank."""
        return self.share(range(len(self.mask)), identity)

    def share(self, rows: Sequence[int], sum_over_ranks: Reduce) -> AdvantageInputs:
        """Return the input of a rank that has some of the rows."""
        own, scores_B = self.take(rows), torch.tensor(self.scores, dtype=torch.float64)
        counts_B = torch.tensor([sum(row) for row in self.mask])
        return AdvantageInputs(
            own.rows,
            own.mask_T,
            torch.tensor([x for row in own.rewards for x in row], dtype=torch.float64),
            own.column("values"),
            torch.tensor(own.baselines, dtype=torch.float64),
            Outcomes(scores_B, self.uids, counts_B, [(1.0, scores_B)], scores_B - 0.5 * counts_B),
            torch.tensor(rows),
            sum_over_ranks,
            own.column("score_norms"),
        )
