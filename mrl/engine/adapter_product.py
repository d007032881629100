"""The product of a pair of adapters with a layer's input: scale * B A x.

Communication is `rank` numbers wide. A column-parallel layer applies A to the rank's own tokens, then gathers the
results. A row-parallel layer applies A to the rank's own columns, then sums the results over the tensor ranks, then
applies B. A factor that every tensor rank holds whole sees only the rank's own tokens with sequence parallelism:
Megatron sums its gradient over the tensor ranks, because it is marked.

Ranks that share an expert (`etp`) get the same tokens, and Megatron sums their outputs and the gradients of their
inputs. So an adapter of an expert needs no communication, except for the gradient of the factor that all of them hold.
"""

from __future__ import annotations

import mrl.engine.with_megatron  # noqa: F401

# isort: split
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor
from torch.nn.functional import linear, pad

from mrl.models.adapters import AdapterPair


@dataclass(frozen=True)
class AdapterProduct:
    """The adapters of one Megatron weight, and how their product is computed."""

    pair: AdapterPair
    a: torch.nn.Parameter
    b: torch.nn.Parameter
    scale: float
    sequence_parallel: bool
    rows: Tensor | None
    """The row of `b` of each output, one after the last if it has none. None if they are in order."""
    sharing: torch.distributed.ProcessGroup | None
    """Ranks that share the expert of this weight. None if there is only one."""

    def add_to(self, value: Tensor, x: Tensor) -> Tensor:
        """Return the layer's output with the product added; without gradients, in place."""
        lows, factors = self._lows_and_factors(x)
        if self.rows is None and not torch.is_grad_enabled():
            parts = torch.split(value, list(self.pair.num_rows), -1)
            for target, part, factor in zip(parts, lows, factors, strict=True):
                target += linear(part, factor)
            return value
        added = torch.cat([linear(part, factor) for part, factor in zip(lows, factors, strict=True)], -1)
        if self.rows is not None:  # `index_add` would keep the addition for the backward pass
            added = pad(added, (0, 1)).index_select(-1, self.rows)
        return value + added

    def _lows_and_factors(self, x: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return each module's scale * A x, and its B."""
        a, b = self._factors()
        low = linear(x, a) * self.scale
        if self.pair.split == "columns":
            reduce = reduce_scatter_to_sequence_parallel_region
            low = reduce(low) if self.sequence_parallel else reduce_from_tensor_model_parallel_region(low)
        elif self.pair.split == "rows":
            gather = gather_from_sequence_parallel_region
            low = gather(low) if self.sequence_parallel else copy_to_tensor_model_parallel_region(low)
        rank = a.shape[0] // len(self.pair.num_rows)
        return torch.split(low, rank, -1), torch.split(b, list(self.pair.num_rows))

    def _factors(self) -> tuple[Tensor, Tensor]:
        """Return A and B. The gradient of a whole one will be summed over the ranks that share the expert."""
        if self.sharing is None:
            return self.a, self.b
        if self.pair.b.split:
            return copy_to_tensor_model_parallel_region(self.a, group=self.sharing), self.b
        return self.a, copy_to_tensor_model_parallel_region(self.b, group=self.sharing)


def rows_of_outputs(pair: AdapterPair) -> Tensor | None:
    """Return the row of `lora_b` of each output, one after the last if it has none. None if they are in order."""
    num_outputs, num_rows = pair.weight.shape[0], pair.b.shape[0]
    starts, stops = zip(*pair.outputs, strict=True)
    if (*starts, num_outputs) == (0, *stops):
        return None
    rows = torch.full((num_outputs,), num_rows)
    rows[torch.cat([torch.arange(*run) for run in pair.outputs])] = torch.arange(num_rows)
    return rows
