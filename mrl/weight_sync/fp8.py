"""Weights that the trainer's ranks quantize to FP8 before they send them, with the arithmetic of vLLM's own quantizer.

The scales of all tensors are computed first: they have less than a hundredth of the bytes. Weights are quantized slice
by slice, when they are packed into a message or a bucket.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.models.fp8_scales import BLOCK, SCALE, Fp8Form, is_on_blocks
from mrl.models.regions import Region, Shape, slices, whole
from mrl.models.table import Shard, hf_tensors
from mrl.weight_sync.planner import ReshardPlanner

Key = tuple[int, str]
_LARGEST = 448.0
_LEAST_CHANNEL, _LEAST_BLOCK = 1 / (_LARGEST * 512), 1e-4
"""Smallest scale of a row, and smallest element that the scale of a block assumes, so that nothing is divided by 0."""
_CHUNK_ELEMENTS = 1 << 22
_SCRATCH_BYTES = 3 * 4 * _CHUNK_ELEMENTS
"""Memory for a part of a slice in float32."""


def channel_scales(largest_R1: Tensor) -> Tensor:
    """Return the scales of rows with these largest elements."""
    # Division by a number would be a multiplication on some devices, with other bits.
    return (largest_R1.float() / torch.tensor(_LARGEST, device=largest_R1.device)).clamp_min(_LEAST_CHANNEL)


def row_maxima(matrix_RC: Tensor) -> Tensor:
    low, high = matrix_RC.aminmax(dim=1, keepdim=True)
    return torch.maximum(low.abs(), high.abs())


def block_scales(matrix_RC: Tensor) -> Tensor:
    """Return the scales of the blocks of a matrix, which consists of whole blocks."""
    rows, columns = matrix_RC.shape
    blocks = matrix_RC.reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    return blocks.abs().float().amax(dim=(1, 3)).clamp(_LEAST_BLOCK) / _LARGEST


def quantize(source_RC: Tensor, scales: Tensor, target_RC: Tensor, form: Fp8Form, first_row: int = 0) -> None:
    """Fill a target in FP8. With blocks, the scales are those of whole blocks, of which `first_row` rows are absent."""
    num_rows, columns = source_RC.shape
    step = max(1, _CHUNK_ELEMENTS // columns)
    for start in range(0, num_rows, step):
        part_RC = source_RC[start : start + step]
        if form == "channel":
            scaled_RC = (part_RC / scales[start : start + step]).clamp_(-_LARGEST, _LARGEST)
        else:
            block_R = torch.arange(start, start + len(part_RC), device=scales.device).add_(first_row) // BLOCK
            inverse_RB1 = (1.0 / scales[block_R]).unsqueeze(-1)
            scaled_RC = (part_RC.view(len(part_RC), -1, BLOCK) * inverse_RB1).view(part_RC.shape)
        target_RC[start : start + step].copy_(scaled_RC.to(target_RC.dtype))


class Fp8Source:
    """The weights of one rank that leave it in FP8, and their scales. All ranks of a trainer `measure` together."""

    def __init__(
        self,
        planner: ReshardPlanner,
        rank: int,
        held: Mapping[Key, Tensor],
        dtype: torch.dtype,
        column_groups: Sequence[dist.ProcessGroup] = (),
    ) -> None:
        """Take the engines' dtype, in which vLLM would quantize, and the groups of ranks that split columns: those of
        dense weights, and those of experts."""
        form, shapes = planner.rollout.sizes.fp8, hf_tensors(planner.spec, "lm")
        assert form is not None, "the engines take no weights in FP8"
        self.form: Fp8Form = form
        self._held, self._dtype, self._groups = held, dtype, column_groups
        shards = [shard for shard in planner.shards(rank) if ".layers." in shard.name and len(shard.shape) == 2]
        self._shards = [shard for shard in shards if form == "channel" or is_on_blocks(whole(shard.shape))]
        self._parts = {
            (shard.chunk, shard.name): shard.expert for shard in self._shards if _is_part_of_rows(shard, shapes)
        }
        self.scales: dict[Key, Tensor] = {}

    @property
    def num_bytes(self) -> int:
        return _SCRATCH_BYTES + sum(scale.nbytes for scale in self.scales.values())

    def measure(self) -> None:
        """Compute the scales of the current weights."""
        measured: dict[Key, Tensor] = {}
        for shard in self._shards:
            key, matrix_RC = (shard.chunk, shard.name), self._held[shard.chunk, shard.name].to(self._dtype)
            measured[key] = row_maxima(matrix_RC) if self.form == "channel" else block_scales(matrix_RC)
        if self.form == "channel":
            for expert, group in enumerate(self._groups):
                _share_maxima([measured[key] for key, of_expert in self._parts.items() if of_expert == expert], group)
            measured = {key: channel_scales(largest_R1) for key, largest_R1 in measured.items()}
        self.scales = {(chunk, name + SCALE): scales for (chunk, name), scales in measured.items()}

    def quantize(self, key: Key, box: Region, target: Tensor) -> None:
        """Quantize a box of a parameter into a target of the same shape."""
        source_RC, scales = self._held[key][slices(box)].to(self._dtype), self.scales[key[0], key[1] + SCALE]
        (first, stop), columns = box
        if self.form == "channel":
            scales = scales[first:stop]
        else:  # messages end between any two rows
            scales = scales[first // BLOCK : -(-stop // BLOCK), columns[0] // BLOCK : columns[1] // BLOCK]
        quantize(source_RC, scales, target, self.form, first % BLOCK)


def _is_part_of_rows(shard: Shard, shapes: Mapping[str, Shape]) -> bool:
    return any(piece.source[1] != (0, shapes[piece.hf][1]) for piece in shard.pieces)


def _share_maxima(maxima: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Replace the largest elements of parts of rows by those of whole rows."""
    if not maxima or group.size() == 1:
        return
    together = torch.cat([largest_R1.flatten() for largest_R1 in maxima]).float()
    dist.all_reduce(together, dist.ReduceOp.MAX, group)
    for largest_R1, whole_R in zip(maxima, torch.split(together, [len(each) for each in maxima]), strict=True):
        largest_R1.copy_(whole_R.view(largest_R1.shape))
