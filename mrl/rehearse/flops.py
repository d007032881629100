"""Floating-point operations of matrix products: torch's own formulas, and the products that stand-ins replace.

Attention between tokens is not counted, as in `mrl plan`'s operations per token.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry


class FlopCounter:
    """Counts what a process computes. A process rehearses one rank."""

    def __init__(self) -> None:
        self.total = 0

    def observe(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Add the operations of a call of torch."""
        if (formula := flop_registry.get(func.overloadpacket)) is not None:
            self.total += formula(*args, out_val=result)

    def product(self, x: Tensor, columns: int) -> None:
        """Add the product of rows with a matrix."""
        self.total += 2 * x.numel() * columns


counted = FlopCounter()
