"""Short digests of tensors, computed on their device, to compare sent and received weights.

Both sides of a transfer use the same device, so each device type has the fastest method: CPUs hash the bytes; GPUs
compute weighted sums, which the host reads once for any number of tensors.
"""

from __future__ import annotations

import hashlib
from functools import cache

import torch
from torch import Tensor

_LETTERS = 32
_CHUNK_ELEMENTS = 1 << 20
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Digests:
    """Digests of tensors by name, at the time they are added: dtype, shape and every bit in 32 letters."""

    def __init__(self) -> None:
        self._found: dict[str, str] = {}
        self._sums: dict[str, tuple[str, Tensor]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._found or name in self._sums

    def add(self, name: str, tensor: Tensor) -> None:
        """Add one tensor. It may change afterwards."""
        kind, flat = f"{tensor.dtype} {tuple(tensor.shape)}", tensor.detach().contiguous().view(-1)
        if tensor.is_cuda:
            self._sums[name] = kind, weighted_sums(flat)
        else:
            content = hashlib.sha256(kind.encode())
            content.update(flat.view(torch.uint8).numpy().data)
            self._found[name] = content.hexdigest()[:_LETTERS]

    def read(self) -> dict[str, str]:
        if self._sums:
            counts = [sums.numel() for _, sums in self._sums.values()]
            parts = torch.split(torch.cat([sums for _, sums in self._sums.values()]).cpu(), counts)
            for (name, (kind, _)), part in zip(self._sums.items(), parts, strict=True):
                content = hashlib.sha256(f"{kind} {part.tolist()}".encode())
                self._found[name] = content.hexdigest()[:_LETTERS]
            self._sums = {}
        return self._found


def digest(tensor: Tensor) -> str:
    digests = Digests()
    digests.add("", tensor)
    return digests.read()[""]


def weighted_sums(flat: Tensor) -> Tensor:
    """Return one sum per chunk. A different element or order changes it.

    Weights are odd, so a chunk with one different element always has another sum. Overflow is intended.
    """
    words = flat.view(_WORDS[flat.element_size()])
    weights = _weights(flat.device)
    chunks = torch.split(words, _CHUNK_ELEMENTS)
    return torch.stack([(chunk.to(torch.int64) * weights[: chunk.numel()]).sum() for chunk in chunks])


@cache
def _weights(device: torch.device) -> Tensor:
    """Return a pseudo-random odd number for each position of a chunk, so that moved content gets other weights."""
    mixed = torch.arange(1, _CHUNK_ELEMENTS + 1, dtype=torch.int64, device=device)
    for factor in (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9):
        mixed = mixed * factor
        mixed = mixed ^ (mixed >> 31)
    return mixed | 1
