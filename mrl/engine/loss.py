"""What a loss function sees of a micro-batch, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor


@dataclass(frozen=True)
class Scores:
    """What the model says of each response token of a micro-batch, in row order, the same on every context rank.

    A policy gives log-probs, and the entropy where it was asked for; a value model values.
    """

    log_probs_T: Tensor | None = None
    entropy_T: Tensor | None = None
    values_T: Tensor | None = None


@dataclass(frozen=True)
class LossInput:
    """A micro-batch for a loss function: the model's scores, and the columns of its rows."""

    scores: Scores
    response_lengths: npt.NDArray[np.int64]
    columns: Mapping[str, Tensor]


@dataclass(frozen=True)
class LossOutput:
    """This micro-batch's share of the loss of the whole update, and of what to report: all are added up, nothing is
    divided afterwards."""

    loss: Tensor
    reports: Mapping[str, Tensor]


LossFunction = Callable[[LossInput], LossOutput]
