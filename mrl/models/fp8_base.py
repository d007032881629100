"""Linear layers of a frozen model that are kept in FP8 (`lora.base_quantization`), by the family's table.

Only the matrices that can have adapters are: routers and other gates, norms, embeddings and heads keep their dtype. A
matrix must consist of whole blocks of 128 x 128 in the files and in Megatron's fused matrix. Otherwise it keeps its
dtype in every layout, so that the model does not depend on the layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache

from mrl.config.schema import ParallelConfig
from mrl.errors import ModelError
from mrl.models.adapters import ADAPTED
from mrl.models.families import FAMILIES
from mrl.models.fp8_scales import BLOCK, is_on_blocks
from mrl.models.layout import RankPlace, layers_of_chunk
from mrl.models.parameters import Parameter, Piece
from mrl.models.spec import ModelSpec
from mrl.models.table import Shard, layers_of_rank, shard_of

SCALE_BYTES = 4


def fp8_shards(spec: ModelSpec, layout: ParallelConfig, place: RankPlace) -> Iterator[Shard]:
    """Yield the shards of a rank that are kept in FP8."""
    check_fp8_base(spec, layout)
    num_local = spec.moe.num_experts // layout.ep if spec.moe else 0
    for chunk, prefix, layer in layers_of_rank(spec, layout, place):
        for parameter in _dense(spec, layer):
            yield shard_of(chunk, prefix + parameter.name, parameter, place.tp, layout.tp)
        for local in range(num_local) if spec.has_experts(layer) else ():
            expert = f"{prefix}mlp.experts.local_experts.{local}."
            for parameter in _of_expert(spec, layer, place.ep * num_local + local):
                name = expert + parameter.name
                yield shard_of(chunk, name, parameter, place.etp, layout.etp, expert=True)


def fp8_tensors(spec: ModelSpec) -> frozenset[str]:
    """Return the Hugging Face tensors that are kept in FP8."""
    shards = fp8_shards(spec, ParallelConfig(), RankPlace())
    return frozenset(piece.hf for shard in shards for piece in shard.pieces)


def fp8_elements(spec: ModelSpec, layout: ParallelConfig, stage: int) -> tuple[int, int]:
    """Return the elements in FP8 on the first rank of a stage, and those of the largest matrix."""
    check_fp8_base(spec, layout)
    num_local, total, largest = spec.moe.num_experts // layout.ep if spec.moe else 0, 0, 0
    for chunk in range(layout.vpp):
        for layer in layers_of_chunk(layout, spec.num_layers, stage, chunk):
            held = [(math.prod(x.share(0, layout.tp)[0]), 1) for x in _dense(spec, layer)]
            if spec.has_experts(layer):
                held += [(math.prod(x.share(0, layout.etp)[0]), num_local) for x in _of_expert(spec, layer, 0)]
            total += sum(size * copies for size, copies in held)
            largest = max(largest, *(size for size, _ in held))
    return total, largest


def fp8_bytes(elements: int) -> int:
    """Return the bytes of matrices with these elements, and of their scales."""
    return elements + elements // BLOCK**2 * SCALE_BYTES


@cache
def check_fp8_base(spec: ModelSpec, layout: ParallelConfig) -> None:
    """Raise an error if the model cannot be kept in FP8, or if the layout cuts a block."""
    kind = "multi-latent attention" if spec.mla else "linear attention" if spec.gdn else "gpt-oss" if spec.sinks else ""
    if kind:
        what = f"a frozen model with {kind} cannot be kept in FP8 yet: its matrices have not been compared"
        raise ModelError(what, fix="remove lora.base_quantization")
    held = [(x, layout.tp, "tp") for layers in spec.layers_by_kind().values() for x in _dense(spec, layers[0])]
    held += [
        (x, layout.etp, "etp")
        for layers in spec.layers_by_kind().values()
        for x in (_of_expert(spec, layers[0], 0) if spec.has_experts(layers[0]) else ())
    ]
    if not held:
        what = f"no matrix of this {spec.family} consists of whole blocks of {BLOCK} x {BLOCK}, so none would be in FP8"
        raise ModelError(what, fix="remove lora.base_quantization")
    for parameter, size, axis in held:
        for rank in range(size):
            shape, pieces, _ = parameter.share(rank, size)
            if not _is_whole(pieces):
                what = (
                    f"parallel.{axis} is {size}, which cuts blocks of {BLOCK} x {BLOCK} of {parameter.parts[0][0].hf}"
                )
                what += f": a rank holds {shape[0]} x {shape[1]} of the fused matrix"
                raise ModelError(what, fix=f"set a smaller parallel.{axis}, or remove lora.base_quantization")


def _dense(spec: ModelSpec, layer: int) -> list[Parameter]:
    parameters = FAMILIES[spec.family].parameters(spec, layer)
    return [x for x in parameters if x.name in ADAPTED and _is_whole(x.share(0, 1)[1])]


def _of_expert(spec: ModelSpec, layer: int, expert: int) -> list[Parameter]:
    parameters = FAMILIES[spec.family].expert(spec, layer, expert)
    return [x for x in parameters if x.columns is not None and _is_whole(x.share(0, 1)[1])]


def _is_whole(pieces: tuple[Piece, ...]) -> bool:
    return all(is_on_blocks(box) for piece in pieces for box in (piece.source, piece.target))
