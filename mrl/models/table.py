"""The slices of Hugging Face tensors that make up each local Megatron parameter, for one rank of a layout.

One table serves reading and writing checkpoints, the reshard into the rollout engine, and the memory plan. Names are
those of Megatron's local layer spec; `local_name` translates Transformer Engine's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

from mrl.config.schema import ParallelConfig
from mrl.models.families import FAMILIES
from mrl.models.layout import RankPlace, check_layout, layers_of_chunk
from mrl.models.open_model import OpenSpec
from mrl.models.parameters import OwnDtype, Parameter, Piece, RowRange
from mrl.models.regions import Region, Shape
from mrl.models.spec import ModelSpec

Head = Literal["lm", "score"]
EMBEDDING, NORM, LM_HEAD, SCORE = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", "score.weight"

_UNFUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.in_proj.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
_TE_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)")


@dataclass(frozen=True, slots=True)
class Shard:
    """One local parameter of one rank: its name in its pipeline chunk, and its pieces."""

    chunk: int
    name: str
    shape: Shape
    pieces: tuple[Piece, ...]
    padding: tuple[Region, ...]  # vocabulary rows without a token
    expert: bool  # split over ep and etp instead of tp
    split: bool  # whether the ranks of tp (of etp for an expert) hold different parts
    dtype: OwnDtype = None
    trained: bool = True  # False: a buffer, not a parameter


def shards_of(spec: ModelSpec, layout: ParallelConfig, place: RankPlace, head: Head) -> list[Shard]:
    check_layout(layout, spec)
    return [*dense_shards(spec, layout, place, head), *expert_shards(spec, layout, place)]


def dense_shards(spec: ModelSpec, layout: ParallelConfig, place: RankPlace, head: Head) -> Iterator[Shard]:
    """Yield the shards of a rank except the experts. They depend only on its place in tp and pp."""

    def shard(chunk: int, parameter: Parameter, prefix: str = "") -> Shard:
        return shard_of(chunk, prefix + parameter.name, parameter, place.tp, layout.tp)

    if place.pp == 0:
        yield shard(0, vocabulary_parameter("embedding.word_embeddings.weight", EMBEDDING, spec))
    for chunk, prefix, layer in layers_of_rank(spec, layout, place):
        for parameter in FAMILIES[spec.family].parameters(spec, layer):
            yield shard(chunk, parameter, prefix)
    if place.pp == layout.pp - 1:
        yield from (shard(layout.vpp - 1, parameter) for parameter in _after_layers(spec, layout, head))


def expert_shards(spec: ModelSpec, layout: ParallelConfig, place: RankPlace) -> Iterator[Shard]:
    """Yield the experts of a rank. They depend only on its place in ep, etp and pp."""
    if spec.moe is None:
        return
    num_local = spec.moe.num_experts // layout.ep
    for chunk, prefix, layer in layers_of_rank(spec, layout, place):
        for local in range(num_local) if spec.has_experts(layer) else ():
            expert_prefix = f"{prefix}mlp.experts.local_experts.{local}."
            for parameter in FAMILIES[spec.family].expert(spec, layer, place.ep * num_local + local):
                assert parameter.dtype is None, f"{parameter.name} of an expert is not in the dtype of the model"
                assert parameter.trained, f"{parameter.name} of an expert is a buffer"
                yield shard_of(chunk, expert_prefix + parameter.name, parameter, place.etp, layout.etp, expert=True)


def layers_of_rank(spec: ModelSpec, layout: ParallelConfig, place: RankPlace) -> Iterator[tuple[int, str, int]]:
    """Yield chunk, name in the chunk, and number in the model of each layer of a rank."""
    for chunk in range(layout.vpp):
        for local, layer in enumerate(layers_of_chunk(layout, spec.num_layers, place.pp, chunk)):
            yield chunk, f"decoder.layers.{local}.", layer


def _after_layers(spec: ModelSpec, layout: ParallelConfig, head: Head) -> Iterator[Parameter]:
    yield Parameter("decoder.final_layernorm.weight", ((RowRange(NORM, 0, spec.hidden),),))
    if head == "score":
        yield Parameter("score.weight", ((RowRange(SCORE, 0, 1),),), spec.hidden)
    elif not spec.tied:
        yield vocabulary_parameter("output_layer.weight", LM_HEAD, spec)
    elif layout.pp > 1:  # a single stage uses the embedding itself
        yield vocabulary_parameter("output_layer.weight", EMBEDDING, spec)


def shard_of(chunk: int, name: str, parameter: Parameter, rank: int, num_ranks: int, expert: bool = False) -> Shard:
    shape, pieces, padding = parameter.share(rank, num_ranks)
    is_split = parameter.split is not None
    return Shard(chunk, name, shape, pieces, padding, expert, is_split, parameter.dtype, parameter.trained)


def vocabulary_parameter(name: str, hf: str, spec: ModelSpec) -> Parameter:
    """Return an embedding or a head: rows of the vocabulary, padded to a multiple of the ranks."""
    return Parameter(name, ((RowRange(hf, 0, spec.vocab),),), spec.hidden, "rows", padded=True)


def hf_tensors(spec: ModelSpec, head: Head) -> dict[str, Shape]:
    """Return the names and shapes of all tensors of the model in Hugging Face's files."""
    FAMILIES[spec.family].architecture(head)  # raises an error if the family has no such head
    if isinstance(spec, OpenSpec):
        return dict(spec.weights)
    tensors: dict[str, Shape] = {EMBEDDING: (spec.vocab, spec.hidden)}
    for layer in range(spec.num_layers):
        tensors |= FAMILIES[spec.family].tensors(spec, layer)
    tensors[NORM] = (spec.hidden,)
    if head == "score":
        tensors[SCORE] = (1, spec.hidden)
    elif not spec.tied:
        tensors[LM_HEAD] = (spec.vocab, spec.hidden)
    return tensors


def file_tensors(spec: ModelSpec, head: Head) -> dict[str, Shape]:
    """Return the same tensors as the files hold them: in some families, one tensor holds all experts of a layer."""
    shapes: dict[str, Shape] = {}
    for name, shape in hf_tensors(spec, head).items():
        part = FAMILIES[spec.family].stored(name)
        if part is None:
            shapes[name] = shape
        else:
            assert spec.moe is not None, f"{name} is part of an expert, but the model has none"
            shapes[part.file] = part.file_shape(spec.moe.num_experts, shape)
    return shapes


@cache
def float32_tensors(spec: ModelSpec) -> frozenset[str]:
    """Return the Hugging Face tensors that files and the trainer keep in float32 in models of any dtype."""
    if isinstance(spec, OpenSpec):
        return spec.untrained()
    shards = dense_shards(spec, ParallelConfig(), RankPlace(), "lm")
    return frozenset(piece.hf for shard in shards if shard.dtype == "float32" for piece in shard.pieces)


def local_name(name: str) -> str:
    """Return the local layer spec's name, as used in `Shard`, of a parameter of either spec."""
    for fused, plain in _UNFUSED_NORMS.items():
        if name.endswith(f".{fused}"):
            return name.removesuffix(fused) + plain
    return _TE_EXPERT.sub(r"mlp.experts.local_experts.\3.\1.\2", name)
