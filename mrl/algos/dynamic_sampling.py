"""DAPO's dynamic sampling: which groups can teach anything. Sampling more of them is the trainer's business."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mrl.algos.groups import Outcomes, PromptGroups
from mrl.errors import BatchError


@dataclass(frozen=True)
class GroupFilter:
    """The groups of a batch whose scores differ, and why the others were dropped."""

    groups: PromptGroups
    keep_G: Tensor
    num_uniform: int
    """Groups of several rows with one score: every group-wise advantage in them is 0."""
    num_single: int
    """Groups of one row: nothing to compare with."""

    @property
    def kept_uids(self) -> tuple[str, ...]:
        """The uids of the kept groups, in order of first appearance."""
        return tuple(uid for uid, kept in zip(self.groups.uids, self.keep_G.tolist(), strict=True) if kept)

    def take(self, num_groups: int) -> Tensor:
        """The rows of the first `num_groups` kept groups, whole and in their order: a full batch or an error."""
        if len(self.kept_uids) < num_groups:
            raise BatchError(
                f"{len(self.kept_uids)} groups with differing scores, but {num_groups} are wanted "
                f"({self.num_uniform} dropped as uniform, {self.num_single} with a single row)",
                fix="sample more prompts before taking",
            )
        chosen_G = self.keep_G & (self.keep_G.cumsum(0) <= num_groups)
        return chosen_G[self.groups.group_B].nonzero().flatten()


def filter_groups(outcomes: Outcomes) -> GroupFilter:
    """Keep a group if and only if its scores are not all equal, compared exactly."""
    groups = PromptGroups.of(outcomes.uids, device=outcomes.scores_B.device)
    keep_G = groups.has_variance(outcomes.scores_B)
    single_G = groups.sizes_G == 1
    return GroupFilter(groups, keep_G, int((~keep_G & ~single_G).sum()), int(single_G.sum()))
