"""Limit on how far generation may run ahead, used by runs and by `mrl plan`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass
class Gate:
    """Decides which batches may begin, from counts only."""

    ahead: int
    num_steps: int
    """Number of steps of the whole run: later batches are never begun."""
    trained: int = 0
    """Number of trained steps whose weights the engines have."""
    begun: int = 0

    def open(self) -> Iterator[int]:
        """Begin the batches that may begin, one after another, and yield their numbers."""
        while self.begun < min(self.trained + 1 + self.ahead, self.num_steps):
            self.begun += 1
            yield self.begun
