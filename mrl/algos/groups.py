"""Groups of rows that answer one prompt, found by uid; their statistics, and DAPO's filter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.algos.rows import Rows
from mrl.errors import BatchError, RewardError

MAX_NAMED_ROWS = 5


@dataclass(frozen=True)
class PromptGroups:
    """Assignment of rows to groups, numbered in order of first appearance."""

    uids: tuple[str, ...]
    group_B: Tensor
    order_B: Tensor
    members: Rows

    @classmethod
    def of(cls, uids: Sequence[str], device: torch.device | str | None = None) -> PromptGroups:
        """Return groups of equal uids. Uids are compared exactly: "42" and "0042" are two groups."""
        number: dict[str, int] = {}
        group_B = torch.tensor([number.setdefault(uid, len(number)) for uid in uids], dtype=torch.int64, device=device)
        sizes_G = torch.bincount(group_B, minlength=len(number))
        return cls(tuple(number), group_B, torch.argsort(group_B, stable=True), Rows.of(sizes_G))

    @property
    def sizes_G(self) -> Tensor:
        return self.members.lengths_B

    @property
    def sizes_B(self) -> Tensor:
        return self.sizes_G[self.group_B]

    def sum(self, x_B: Tensor) -> Tensor:
        return self.members.sum(x_B[self.order_B])

    def from_first(self, x_B: Tensor) -> Tensor:
        """Return x_i - x_f, where f is the first row of i's group: exactly 0 in a group of equal values."""
        first_G = x_B[self.order_B][self.members.starts_B]
        return x_B - first_G[self.group_B]

    def centered(self, x_B: Tensor, weights_B: Tensor | None = None) -> Tensor:
        """Return x_i - sum_j w_j x_j / sum_j w_j over i's group (w = 1 by default).

        The result is exactly 0 in a group of one and in a group of equal values. A large common offset costs no
        precision, because each group is first shifted by one of its values.
        """
        shifted_B = self.from_first(x_B)
        weights_B = torch.ones_like(x_B) if weights_B is None else weights_B.to(x_B.dtype)
        total_G = self.sum(weights_B)
        mean_G = self.sum(weights_B * shifted_B) / torch.where(total_G > 0, total_G, 1.0)
        return shifted_B - mean_G[self.group_B]

    def two_largest(self, x_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return each group's largest value and the next one, which is equal if two rows share it. In a group of one,
        the next one is -infinity."""
        sorted_B = x_B[self.order_B]
        largest_G = torch.segment_reduce(sorted_B, "max", lengths=self.sizes_G, unsafe=True, initial=-torch.inf)
        is_largest_B = sorted_B == largest_G[self.members.row_T]
        below_B = torch.where(is_largest_B, -torch.inf, sorted_B)
        second_G = torch.segment_reduce(below_B, "max", lengths=self.sizes_G, unsafe=True, initial=-torch.inf)
        return largest_G, torch.where(self.members.sum(is_largest_B.to(x_B.dtype)) > 1, largest_G, second_G)

    def has_variance(self, x_B: Tensor) -> Tensor:
        return self.sum((self.from_first(x_B) != 0).to(torch.float64)) > 0


@dataclass(frozen=True)
class Outcomes:
    """One score per row of the whole batch, on every rank, for group-wise estimators.

    Groups may be spread over ranks, so statistics need all scores, which are a few numbers per row. A reward that is
    NaN or infinite is rejected here, before it affects its group.
    """

    scores_B: Tensor
    uids: Sequence[str]
    num_tokens_B: Tensor
    rewards: Sequence[tuple[float, Tensor]] = ()
    """Weight and scores of each reward function, for estimators that normalize each."""
    log_ratios_B: Tensor | None = None
    """log pi_old - log pi_ref of each row, summed over its tokens, for estimators that compare with the reference."""

    def __post_init__(self) -> None:
        if not (self.scores_B.shape == self.num_tokens_B.shape == (len(self.uids),)):
            sizes = f"{self.scores_B.numel()} scores, {len(self.uids)} uids, {self.num_tokens_B.numel()} token counts"
            raise BatchError(f"expected one of each per row, but got {sizes}")
        check_finite(self.scores_B, self.uids)
        for _, reward_B in self.rewards:
            check_finite(reward_B, self.uids)


def check_finite(scores_B: Tensor, uids: Sequence[str]) -> None:
    """Raise an error for scores that are not finite, with their rows."""
    bad = (~torch.isfinite(scores_B)).nonzero().flatten().tolist()
    if not bad:
        return
    named = ", ".join(f"row {row} (uid {uids[row]}): {float(scores_B[row])}" for row in bad[:MAX_NAMED_ROWS])
    more = f" and {len(bad) - MAX_NAMED_ROWS} more" if len(bad) > MAX_NAMED_ROWS else ""
    raise RewardError(
        f"{len(bad)} of {scores_B.numel()} rewards are missing or not finite: {named}{more}",
        fix="make the reward function return a finite number for every row, or drop those groups first",
    )


def check_not_negative(estimator: str, scores_B: Tensor, uids: Sequence[str]) -> None:
    """Raise an error for negative scores, with the first row."""
    negative = (scores_B < 0).nonzero().flatten().tolist()
    if negative:
        first = negative[0]
        raise RewardError(
            f"{len(negative)} of {scores_B.numel()} scores are negative, but {estimator} divides by their mean; "
            f"first: {float(scores_B[first]):g} (uid {uids[first]})",
            fix="make the reward function return 0 for a failure and 1 for a success, or use algorithm.advantage=grpo",
        )


@dataclass(frozen=True)
class GroupFilter:
    """The groups of a batch whose scores differ, and the numbers of dropped groups by reason."""

    groups: PromptGroups
    keep_G: Tensor
    num_uniform: int
    """Groups of several rows with equal scores: all of their group-wise advantages are 0."""
    num_single: int
    """Groups of one row, which have nothing to compare with."""

    @property
    def kept_uids(self) -> tuple[str, ...]:
        return tuple(uid for uid, kept in zip(self.groups.uids, self.keep_G.tolist(), strict=True) if kept)

    def take(self, num_groups: int) -> Tensor:
        """Return the rows of the first `num_groups` kept groups, complete and in order. Raise an error if there are too
        few."""
        if len(self.kept_uids) < num_groups:
            raise BatchError(
                f"{len(self.kept_uids)} groups with differing scores, but {num_groups} are needed "
                f"({self.num_uniform} dropped as uniform, {self.num_single} with a single row)",
                fix="sample more prompts before taking",
            )
        chosen_G = self.keep_G & (self.keep_G.cumsum(0) <= num_groups)
        return chosen_G[self.groups.group_B].nonzero().flatten()


def filter_groups(outcomes: Outcomes) -> GroupFilter:
    """Keep a group if and only if its scores differ, compared exactly."""
    groups = PromptGroups.of(outcomes.uids, device=outcomes.scores_B.device)
    keep_G = groups.has_variance(outcomes.scores_B)
    single_G = groups.sizes_G == 1
    return GroupFilter(groups, keep_G, int((~keep_G & ~single_G).sum()), int(single_G.sum()))
