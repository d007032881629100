"""A frozen model whose linear layers hold FP8: each makes its weight for a product, and again for the backward pass.

The weight exists while the layer computes. Autograd keeps a note instead of it (`saved_tensors_hooks`), so the layers
of Megatron and of Transformer Engine run unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from mrl.models.fp8_exact import exact_scales, from_fp8, to_fp8
from mrl.models.table import Shard

_NUM_KEPT = 2
"""Weights that are kept while they are sent, because several slices are sent one after another."""
_HELD = "fp8_weight"
Key = tuple[int, str]


@dataclass(frozen=True)
class _Note:
    """A view of a weight that autograd will need."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Fp8Weight:
    """The weight of one linear layer, instead of the parameter of its module."""

    def __init__(self, module: Any) -> None:
        weight: Tensor = module.weight.detach()
        self.dtype, self.scales = weight.dtype, exact_scales(weight)
        self.fp8 = to_fp8(weight, self.scales)
        del module.weight
        # Code that reads the weight outside of a product gets its shape, and an error if it computes with it.
        module.weight = self._outside = torch.empty((), dtype=weight.dtype, device="meta").expand(weight.shape)
        module.forward = partial(self._forward, module, module.forward)
        setattr(module, _HELD, self)

    def value(self) -> Tensor:
        return from_fp8(self.fp8, self.scales, self.dtype)

    def _forward(self, module: Any, forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        module.weight = value = self.value()
        storage = value.untyped_storage()._cdata

        def pack(tensor: Tensor) -> Tensor | _Note:
            if tensor.untyped_storage()._cdata != storage:
                return tensor
            return _Note(tensor.size(), tensor.stride(), int(tensor.storage_offset()))

        try:
            with saved_tensors_hooks(pack, self._unpack):
                return forward(*inputs, **options)
        finally:
            module.weight = self._outside

    def _unpack(self, kept: Tensor | _Note) -> Tensor:
        return kept if isinstance(kept, Tensor) else self.value().as_strided(kept.size, kept.stride, kept.offset)


@torch.no_grad()
def keep_in_fp8(chunks: Sequence[torch.nn.Module], shards: Iterator[Shard]) -> None:
    """Quantize loaded weights, one after another."""
    for shard in shards:
        module: Any = chunks[shard.chunk].get_submodule(shard.name.removesuffix(".weight"))
        assert tuple(module.weight.shape) == shard.shape, f"{shard.name} is not the table's"
        Fp8Weight(module)


def fp8_weights(chunk: torch.nn.Module) -> Iterator[tuple[str, Fp8Weight]]:
    """Yield the weights in FP8, by the names that their parameters had."""
    for name, module in chunk.named_modules():
        if hasattr(module, _HELD):
            yield f"{name}.weight", getattr(module, _HELD)


def fp8_memory(chunks: Sequence[torch.nn.Module]) -> list[Tensor]:
    """Return the memory of the weights in FP8, each tensor with its own storage."""
    held = [weight for chunk in chunks for _, weight in fp8_weights(chunk)]
    return [tensor for weight in held for tensor in (weight.fp8, weight.scales)]


class WeightsToSend(Mapping[Key, Tensor]):
    """A rank's weights by chunk and name. Those in FP8 are made when they are read."""

    def __init__(self, held: Mapping[Key, Tensor | Fp8Weight]) -> None:
        self._held = held
        self._kept: dict[Key, Tensor] = {}

    def forget(self) -> None:
        """Free the weights that were made last."""
        self._kept.clear()

    def __getitem__(self, key: Key) -> Tensor:
        held = self._held[key]
        if isinstance(held, Tensor):
            return held
        if key not in self._kept:
            while len(self._kept) >= _NUM_KEPT:
                self._kept.pop(next(iter(self._kept)))
            self._kept[key] = held.value()
        return self._kept[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)
