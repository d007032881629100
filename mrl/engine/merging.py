"""Weights with their adapters added, for engines and files that know no adapters.

The sum is computed in float32 and rounded once. Rounding to bfloat16 removes most of a small update: a weight stays as
it was unless it moves by half of its last digit. `RoundingLoss` measures this.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.models.adapters import AdapterPair

_ROWS_AT_ONCE = 4096
_NUM_KEPT = 2
"""Merged tensors that are kept, because several slices of a tensor are sent one after another."""
Key = tuple[int, str]


@dataclass
class RoundingLoss:
    """How much of an update rounding removes."""

    moved: float = 0.0
    """Sum of the sizes of all weights' updates."""
    lost: float = 0.0
    """The part of it in weights that are the same after the update as before."""

    @property
    def share(self) -> float:
        return self.lost / self.moved if self.moved else 0.0

    def __str__(self) -> str:
        return f"rounding left {self.share:.1%} of the update out"

    def add(self, update: Tensor, before: Tensor, after: Tensor) -> None:
        sizes = update.abs()
        self.moved += float(sizes.sum(dtype=torch.float64))
        self.lost += float(torch.where(before == after, sizes, 0.0).sum(dtype=torch.float64))


class MergedWeights(Mapping[Key, Tensor]):
    """A rank's weights by chunk and name. Weights with adapters are merged when they are read."""

    def __init__(
        self,
        base: Mapping[Key, Tensor],
        adapters: Sequence[tuple[AdapterPair, Tensor, Tensor]],
        scale: float,
        engine_dtype: torch.dtype,
    ) -> None:
        self._base, self._scale, self._engine_dtype = base, scale, engine_dtype
        self._adapters = {(pair.weight.chunk, pair.weight.name): (pair, a, b) for pair, a, b in adapters}
        self._adapted: Collection[Key] = self._adapters.keys()
        self._kept: dict[Key, Tensor] = {}
        self._counted: set[Key] = set()
        self.loss = RoundingLoss()

    def begin(self) -> None:
        """Prepare for merging, after the adapters have changed. Call this on all ranks."""
        self.forget()

    def forget(self) -> None:
        """Merge again, after the adapters have changed. The loss starts at zero."""
        self._kept.clear()
        self._counted.clear()
        self.loss = RoundingLoss()

    def __getitem__(self, key: Key) -> Tensor:
        if key not in self._adapted:
            return self._base[key]
        if key not in self._kept:
            while len(self._kept) >= _NUM_KEPT:
                self._kept.pop(next(iter(self._kept)))
            self._kept[key] = self._merged(key)
        return self._kept[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._base)

    def __len__(self) -> int:
        return len(self._base)

    def _factors(self, key: Key) -> tuple[AdapterPair, Tensor, Tensor]:
        return self._adapters[key]

    @torch.no_grad()
    def _merged(self, key: Key) -> Tensor:
        pair, a, b = self._factors(key)
        weight, merged = self._base[key], self._base[key].detach().clone()
        lows = torch.split(a.float(), a.shape[0] // len(pair.num_rows))
        module_of = [number for number, count in enumerate(pair.num_rows) for _ in range(count)]
        end = 0
        for start, stop in pair.outputs:
            for first in range(start, stop, _ROWS_AT_ONCE):
                last = min(stop, first + _ROWS_AT_ONCE)
                low, up = lows[module_of[end]], b[end : end + last - first].float()
                update, before = self._scale * (up @ low), weight[first:last]
                merged[first:last] = before.float() + update
                if key not in self._counted:
                    kept = merged[first:last].to(self._engine_dtype)
                    self.loss.add(update, before.to(self._engine_dtype), kept)
                end += last - first
        self._counted.add(key)
        return merged
