"""The configurations of `mrl rm` and `mrl dpo`: training on responses of which one was preferred to another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from mrl.config.bounds import Amount, Bound, Share, Text
from mrl.config.sft import SftConfig

WITHOUT_REFERENCE = ("simpo", "orpo")
"""Losses of the policy's own log-probs."""
Minority = Annotated[float, Bound("at least 0 and less than 0.5", lambda value: 0 <= value < 0.5)]


@dataclass(frozen=True, kw_only=True)
class RewardLossConfig:
    """What a reward model learns from."""

    loss: Literal["bradley_terry", "regression"] = "bradley_terry"
    """`bradley_terry` learns which response was preferred, `regression` the number that each has."""
    margin: bool = False
    """Whether the preferred response has to win by the margin of its pair (columns.label)."""
    smoothing: Minority = 0.0
    """Share of the pairs that are taken to stand the wrong way round."""
    centering: Amount = 0.0
    """Holds scores around 0, from which a loss of differences lets them drift: times the square of a pair's sum; 0.01
    is usual."""


@dataclass(frozen=True, kw_only=True)
class DpoLossConfig:
    """What a policy learns from pairs, against itself before training."""

    loss: Text = "sigmoid"
    """`sigmoid` (DPO as published), `conservative` and `robust` (labels that may be wrong), `hinge`, `ipo_sum`,
    `ipo_mean`; `simpo` and `orpo`, which know no reference; or your own as `package.module:attribute`."""
    beta: Share = 0.1
    """How far the policy may go for the preferences: a large one holds it closer to the reference."""
    smoothing: Minority = 0.0
    """Share of the pairs that are taken to stand the wrong way round: of `conservative`, `robust` and `simpo`."""
    gamma: Amount = 0.0
    """By how much `simpo` has the preferred response win; subtracted as it stands, not times beta."""
    average: bool = False
    """Whether log-probs are means over a response's tokens instead of sums; beta is then larger, 1 to 5."""
    sft_weight: Amount = 0.0
    """Of the likelihood of the preferred response, which DPO alone lets fall as long as the other's falls more."""
    reference: Literal["in_place", "once"] = "in_place"
    """`in_place` keeps the weights as they were before training, which take the policy's place at every update; `once`
    computes what they say of all rows before the first update, into `reference.bin`, and keeps no such weights."""

    def is_of_means(self) -> bool:
        """Return whether a response's reward is of the mean over its tokens instead of the sum, as the loss is."""
        return self.average or self.loss in ("ipo_mean", "simpo", "orpo")


@dataclass(frozen=True, kw_only=True)
class RankedConfig(SftConfig):
    """What `mrl rm` and `mrl dpo` share with each other and with `mrl sft`: a row is a prompt with its responses."""

    def is_of_pairs(self) -> bool:
        """Return whether rows have two responses or more, as the columns of some source say."""
        sources = [*self.data.train.values(), *self.data.validation.values()]
        return any(source.columns.rejected is not None for source in sources)


@dataclass(frozen=True, kw_only=True)
class RmConfig(RankedConfig):
    """A whole configuration of `mrl rm`."""

    reward: RewardLossConfig


@dataclass(frozen=True, kw_only=True)
class DpoConfig(RankedConfig):
    """A whole configuration of `mrl dpo`."""

    preference: DpoLossConfig
