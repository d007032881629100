"""Floating-point operations of matrix products: torch's own formulas, and the products that stand-ins replace.

Attention between tokens is not counted, as in `mrl plan`'s operations per token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm)


class FlopCounter:
    """Counts what a process computes. A process rehearses one rank."""

    def __init__(self) -> None:
        self.total = 0

    def observe(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Add the operations of a call of torch."""
        if func.overloadpacket in _PRODUCTS:
            operands = (value for value in args if isinstance(value, Tensor))
            self.total += flop_registry[func.overloadpacket](*operands, out_val=result)

    def product(self, x: Tensor, columns: int) -> None:
        """Add the product of rows with a matrix."""
        self.total += 2 * x.numel() * columns


counted = FlopCounter()
