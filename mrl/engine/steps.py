"""Results and state of optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

MAX_CONSECUTIVE_SKIPPED_UPDATES = 3


@dataclass(frozen=True)
class StepOutcome:
    """Result of one optimizer step: the gradient norm, and whether the gradients were applied."""

    grad_norm: float
    learning_rate: float
    applied: bool


@dataclass(frozen=True)
class OwnedState:
    """The range of a parameter's elements that a data-parallel rank owns: start, weights ("param") and moments."""

    start: int
    state: dict[str, Tensor]
