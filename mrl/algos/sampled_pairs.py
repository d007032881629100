"""Pairs of the samples of a policy: the best and the worst answers to each prompt."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from mrl.algos.groups import PromptGroups


@dataclass(frozen=True)
class SampledPairs:
    """Each best answer with each worst one, for prompts whose scores differ. A prompt's pairs weigh one together, and
    all pairs of the batch weigh one."""

    better_P: Tensor
    worse_P: Tensor
    weight_P: Tensor
    num_prompts_without: int
    """Prompts whose answers all have the same score."""
    num_samples_without: int

    @classmethod
    def of(cls, scores_B: Tensor, groups: PromptGroups) -> SampledPairs:
        better, worse, weights = [], [], []
        for members in torch.split(groups.order_B, groups.sizes_G.tolist()):
            own = scores_B[members]
            if own.min() == own.max():
                continue
            pairs = torch.cartesian_prod(members[own == own.max()], members[own == own.min()])
            better.append(pairs[:, 0])
            worse.append(pairs[:, 1])
            weights.append(torch.full((len(pairs),), 1 / len(pairs), dtype=torch.float64, device=scores_B.device))
        if not better:
            none = torch.zeros(0, dtype=torch.int64, device=scores_B.device)
            return cls(none, none, none.double(), len(groups.uids), scores_B.numel())
        better_P, worse_P = torch.cat(better), torch.cat(worse)
        num_samples = len({*better_P.tolist(), *worse_P.tolist()})
        num_without = len(groups.uids) - len(weights)
        weight_P = torch.cat(weights) / len(weights)
        return cls(better_P, worse_P, weight_P, num_without, scores_B.numel() - num_samples)

    def gap(self, x_B: Tensor) -> Tensor:
        return x_B[self.better_P] - x_B[self.worse_P]

    def figures(self, margin_P: Tensor) -> dict[str, float]:
        """Return DPO's loss of these margins, the share of pairs with a positive one, and how many have no pair."""
        figures: dict[str, float] = {
            "pairs": self.better_P.numel(),
            "prompts_without_pair": self.num_prompts_without,
            "samples_without_pair": self.num_samples_without,
        }
        means_P = {"loss": softplus(-margin_P), "accuracy": 0.5 * (margin_P.sign() + 1), "margin": margin_P}
        for name, values_P in means_P.items() if margin_P.numel() else ():
            figures[name] = float((self.weight_P * values_P).sum())
        return {f"online_dpo/{name}": float(value) for name, value in figures.items()}
