"""A digest of a model's frozen weights that does not depend on the layout or on the files they came from.

A tensor's number is the sum of its elements' bits, each times an odd number that depends on the element's place: a
moved or changed element changes the sum. Overflow is intended. Ranks add up the sums of their parts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.models.regions import Region, slices
from mrl.models.table import EMBEDDING, Shard

_WORDS = {2: torch.int16, 4: torch.int32}
_ROWS_AT_ONCE = 4096
_FACTORS = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9)


def is_first_copy(shard: Shard, tensor_rank: int) -> bool:
    """Return whether a rank's shard is the first of several copies: of tensor ranks, and of pipeline stages."""
    tied_copy = shard.name == "output_layer.weight" and shard.pieces[0].hf == EMBEDDING
    return not tied_copy and (shard.split or tensor_rank == 0)


def tensor_sums(names: Sequence[str], held: Iterable[tuple[Shard, Tensor]], device: torch.device) -> Tensor:
    """Return the sums of these Hugging Face tensors over the parts that a rank holds."""
    sums = torch.zeros(len(names), dtype=torch.int64, device=device)
    number_of = {name: number for number, name in enumerate(names)}
    for shard, tensor in held:
        for piece in shard.pieces:
            sums[number_of[piece.hf]] += weighted_sum(tensor.detach()[slices(piece.target)], piece.source)
    return sums


def digest_over_ranks(names: Sequence[str], held: Iterable[tuple[Shard, Tensor]], device: torch.device) -> str:
    """Return the digest of these tensors. Each part must be held by one rank. Call this on all ranks."""
    sums = tensor_sums(names, held, device)
    dist.all_reduce(sums)
    return digest_of_sums(names, sums.tolist())


def digest_of_sums(names: Sequence[str], sums: Sequence[int]) -> str:
    return hashlib.sha256(str(sorted(zip(names, sums, strict=True))).encode()).hexdigest()


def weighted_sum(values: Tensor, box: Region) -> Tensor:
    """Return the sum of a box of a tensor."""
    matrix = values.reshape(len(values), -1)
    columns = _odd_numbers(*(box[1] if len(box) > 1 else (0, 1)), 1, values.device)
    rows = _odd_numbers(*box[0], 0, values.device)
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for start in range(0, len(matrix), _ROWS_AT_ONCE):
        part = matrix[start : start + _ROWS_AT_ONCE].contiguous().view(_WORDS[matrix.element_size()])
        total += ((part.to(torch.int64) * columns).sum(1) * rows[start : start + _ROWS_AT_ONCE]).sum()
    return total


def _odd_numbers(start: int, stop: int, axis: int, device: torch.device) -> Tensor:
    """Return a pseudo-random odd number for each place on an axis."""
    mixed = 2 * torch.arange(start + 1, stop + 1, dtype=torch.int64, device=device) + axis
    for factor in _FACTORS:
        mixed = mixed * factor
        mixed = mixed ^ (mixed >> 31)
    return mixed | 1
