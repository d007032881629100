"""How far generation may be ahead: a rule of counts alone, which runs and `mrl plan` go by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass
class Gate:
    """Which batches may begin: a rule of counts alone."""

    ahead: int
    num_steps: int
    """Of the whole run: no batch is begun that is not trained."""
    trained: int = 0
    """Steps whose weights the engines have."""
    begun: int = 0

    def open(self) -> Iterator[int]:
        """Begin the batches that may, one after another; yield their numbers."""
        while self.begun < min(self.trained + 1 + self.ahead, self.num_steps):
            self.begun += 1
            yield self.begun
