"""Weights between Hugging Face files and Megatron's parameters, by the family's table."""

from __future__ import annotations

import mrl.engine.with_megatron  # noqa: F401

# isort: split
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from mrl.dtypes import torch_dtype
from mrl.engine.fp8_base import Fp8Weight, WeightsToSend, fp8_weights
from mrl.engine.model import TokenModel
from mrl.engine.parallel import ParallelGroups
from mrl.errors import EngineError, ModelError
from mrl.models.adapters import ADAPTER_SUFFIXES
from mrl.models.hf_reader import HfReader, load_shard
from mrl.models.layout import RankPlace
from mrl.models.regions import slices
from mrl.models.spec import ModelSpec
from mrl.models.table import SCORE, Head, Shard, local_name, shards_of


def rank_shards(spec: ModelSpec, head: Head, groups: ParallelGroups) -> list[Shard]:
    """Return the shards that this rank holds, by the table."""
    return shards_of(spec, groups.parallel, rank_place(groups), head)


def rank_place(groups: ParallelGroups) -> RankPlace:
    return RankPlace(tp=groups.at.tp, pp=groups.at.pp, ep=groups.at.ep, etp=groups.at.etp)


def held_tensors(
    chunks: Sequence[TokenModel], spec: ModelSpec, head: Head, groups: ParallelGroups
) -> Iterator[tuple[Shard, Tensor]]:
    """Yield each shard of the table with the parameter or buffer that holds it, or with the weight made from its FP8.

    Raise an error if one exists without the other. Megatron's modules may have buffers without a shard. Adapters have
    a separate table.
    """
    for shard, held in _held(chunks, spec, head, groups):
        yield shard, held.value() if isinstance(held, Fp8Weight) else held


def weights_to_send(chunks: Sequence[TokenModel], spec: ModelSpec, head: Head, groups: ParallelGroups) -> WeightsToSend:
    return WeightsToSend({(shard.chunk, shard.name): held for shard, held in _held(chunks, spec, head, groups)})


def _held(
    chunks: Sequence[TokenModel], spec: ModelSpec, head: Head, groups: ParallelGroups
) -> Iterator[tuple[Shard, Tensor | Fp8Weight]]:
    parameters: dict[tuple[int, str], Tensor | Fp8Weight] = {
        (number, local_name(name)): parameter
        for number, chunk in enumerate(chunks)
        for name, parameter in _named(chunk, head)
    }
    buffers = {
        (number, local_name(name)): buffer
        for number, chunk in enumerate(chunks)
        for name, buffer in chunk.named_buffers()
    }
    for shard in rank_shards(spec, head, groups):
        key = (shard.chunk, shard.name)
        tensors: dict[tuple[int, str], Any] = parameters if shard.trained else buffers
        if key not in tensors:
            raise EngineError(
                f"the table has `{shard.name}` in chunk {shard.chunk} of this rank, but Megatron does not"
            )
        parameter = tensors.pop(key)
        if not isinstance(parameter, Fp8Weight) and tuple(parameter.shape) != shard.shape:
            raise EngineError(f"`{shard.name}` is {tuple(parameter.shape)} in Megatron and {shard.shape} in the table")
        yield shard, parameter
    if parameters:
        uncovered = ", ".join(f"`{name}` in chunk {chunk}" for chunk, name in list(parameters)[:8])
        raise EngineError(f"the table does not cover {len(parameters)} of Megatron's parameters: {uncovered}")


def _named(chunk: TokenModel, head: Head) -> Iterator[tuple[str, torch.nn.Parameter | Fp8Weight]]:
    """Yield the parameters of a model with this head. Another role may have its own head on the same chunk."""
    yield from fp8_weights(chunk)
    tied_away = chunk.pre_process and chunk.post_process and chunk.share_embeddings_and_output_weights
    others = {"output_layer.weight"} if tied_away or head == "score" else set()
    others |= {SCORE} if head == "lm" else set()
    for name, parameter in chunk.named_parameters():
        if not name.endswith(ADAPTER_SUFFIXES) and name not in others:
            yield name, parameter


@torch.no_grad()
def zero_score_head(chunks: Sequence[TokenModel]) -> None:
    """Start a new score head at zero. All tensor ranks hold it whole."""
    if chunks[-1].post_process:
        weight: Any = chunks[-1].score.weight
        weight.zero_()
        weight.tensor_model_parallel = False


@torch.no_grad()
def load(chunks: Sequence[TokenModel], reader: HfReader, spec: ModelSpec, head: Head, groups: ParallelGroups) -> None:
    """Fill every parameter of this rank. Only its parts of the files are read, and one of all ranks with a copy reads.

    Parameters also get marks that Megatron does not set here. `tensor_model_parallel`: Megatron sets it only when
    it draws random weights; without it the gradient norm counts only the first part of a split tensor, and no bias of
    the experts of other tensor ranks. `allreduce`: Megatron reduces experts in their own data-parallel group only if
    ep > 1, and forgets experts that tensor ranks hold whole. `sequence_parallel` is removed from biases of experts:
    Megatron would add up the gradients of different experts over tensor ranks.
    """
    sums = []
    own_reduction = groups.parallel.ep > 1 or groups.parallel.etp != groups.parallel.tp
    dtype = chunks[0].config.params_dtype
    for shard, parameter in held_tensors(chunks, spec, head, groups):
        wanted = torch_dtype(shard.dtype) if shard.dtype else dtype
        if parameter.dtype != wanted:
            parameter.data = parameter.data.to(wanted)  # before Megatron's buffers hold it
        parameter.tensor_model_parallel = shard.split or shard.expert  # type: ignore[attr-defined]  # Megatron's mark
        if shard.expert:
            parameter.sequence_parallel = False  # type: ignore[attr-defined]  # Megatron's mark
            parameter.allreduce = not own_reduction  # type: ignore[attr-defined]  # Megatron's mark
        if shard.name == SCORE and SCORE not in reader:
            parameter.zero_()  # `HfReader.check` made sure that a new head is expected
        else:
            copies = copies_of(expert=shard.expert)
            if copies.rank() == 0:
                parameter.copy_(load_shard(reader, shard, dtype))
            if copies.size() > 1:
                dist.broadcast(parameter, group=copies, group_src=0)
            sums.append((shard, parameter, parameter.sum(dtype=torch.float32)))
    # One synchronization for all of them. A sum is finite if its numbers are, except for huge ones.
    if sums and not torch.stack([total for *_, total in sums]).isfinite().all():
        for shard, parameter, _ in sums:
            _refuse_not_finite(shard, parameter, reader)


def copies_of(*, expert: bool) -> dist.ProcessGroup:
    """Return the ranks that hold the same experts as this one, or the same other weights.

    The first of them reads. Otherwise the bytes from the shared file system would grow with the copies.
    """
    group: dist.ProcessGroup = (
        parallel_state.get_expert_data_parallel_group()
        if expert
        else parallel_state.get_data_parallel_group(with_context_parallel=True)
    )
    return group


def _refuse_not_finite(shard: Shard, parameter: Tensor, reader: HfReader) -> None:
    for piece in shard.pieces:
        if num := int((~parameter[slices(piece.target)].isfinite()).sum()):
            problem = f"{num} numbers of {piece.hf} are NaN or infinite"
            raise ModelError(problem, where=str(reader.path), fix="download the file again, or use another checkpoint")
