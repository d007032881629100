"""Weights between Hugging Face files and Megatron's parameters, through the family's table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mrl.engine.model import TokenModel
from mrl.engine.parallel import ParallelGroups
from mrl.errors import EngineError, ModelError
from mrl.models.hf_reader import HfReader, load_shard
from mrl.models.layout import RankPlace
from mrl.models.parameters import padded_vocab
from mrl.models.regions import slices
from mrl.models.spec import ModelSpec
from mrl.models.table import EMBEDDING, LM_HEAD, SCORE, Head, Shard, local_name, shards_of


def rank_shards(spec: ModelSpec, head: Head, groups: ParallelGroups) -> list[Shard]:
    """Return what this rank holds, according to the table."""
    place = RankPlace(tp=groups.at.tp, pp=groups.at.pp, ep=groups.at.ep, etp=groups.at.etp)
    return shards_of(spec, groups.parallel, place, head)


def held_tensors(
    chunks: Sequence[TokenModel], spec: ModelSpec, head: Head, groups: ParallelGroups
) -> Iterator[tuple[Shard, Tensor]]:
    """Yield each shard of the table beside the parameter that holds it; either without the other is an error."""
    parameters = {
        (number, local_name(name)): parameter
        for number, chunk in enumerate(chunks)
        for name, parameter in _named(chunk)
    }
    for shard in rank_shards(spec, head, groups):
        key = (shard.chunk, shard.name)
        if key not in parameters:
            raise EngineError(f"the table gives this rank `{shard.name}` in chunk {shard.chunk}; Megatron has no such")
        parameter = parameters.pop(key)
        if tuple(parameter.shape) != shard.shape:
            raise EngineError(f"`{shard.name}` is {tuple(parameter.shape)} in Megatron and {shard.shape} in the table")
        yield shard, parameter
    if parameters:
        rest = ", ".join(f"`{name}` in chunk {chunk}" for chunk, name in list(parameters)[:8])
        raise EngineError(f"the table does not cover {len(parameters)} of Megatron's parameters: {rest}")


def _named(chunk: TokenModel) -> Iterator[tuple[str, torch.nn.Parameter]]:
    tied_away = chunk.pre_process and chunk.post_process and chunk.share_embeddings_and_output_weights
    for name, parameter in chunk.named_parameters():
        if not (tied_away and name == "output_layer.weight"):
            yield name, parameter


def output_rows(reader: HfReader, spec: ModelSpec, vocab: int, tp_rank: int, tp: int) -> Tensor:
    """Return the rows of a model's output matrix for what a rank has of a vocabulary, which may be a smaller one."""
    num_rows = padded_vocab(vocab, tp) // tp
    first, stop = tp_rank * num_rows, min((tp_rank + 1) * num_rows, vocab)
    rows = reader.read(EMBEDDING if spec.tied else LM_HEAD, ((first, stop), (0, spec.hidden)))
    return torch.nn.functional.pad(rows, (0, 0, 0, num_rows - len(rows)))


@torch.no_grad()
def load(chunks: Sequence[TokenModel], reader: HfReader, spec: ModelSpec, head: Head, groups: ParallelGroups) -> None:
    """Fill every parameter of this rank from the files; only what the rank holds is read.

    Parameters also get two marks that Megatron leaves out here. Split or not: it sets that only while it draws random
    weights, and without it the gradient norm counts a split tensor's first part alone. Reduced with the experts' own
    data-parallel group: it takes ep > 1 for the only reason, and forgets experts that tensor ranks hold whole.
    """
    sums = []
    own_reduction = groups.parallel.ep > 1 or groups.parallel.etp != groups.parallel.tp
    for shard, parameter in held_tensors(chunks, spec, head, groups):
        parameter.tensor_model_parallel = shard.split  # type: ignore[attr-defined]  # Megatron's mark
        if shard.expert:
            parameter.allreduce = not own_reduction  # type: ignore[attr-defined]  # Megatron's mark
        if shard.name == SCORE and SCORE not in reader:
            parameter.zero_()  # `HfReader.check` has seen that a new head is wanted
        else:
            parameter.copy_(load_shard(reader, shard, parameter.dtype))
            sums.append((shard, parameter, parameter.sum(dtype=torch.float32)))
    # One look at the device for all of them; a sum is finite where its numbers are, but for enormous ones.
    if sums and not torch.stack([total for *_, total in sums]).isfinite().all():
        for shard, parameter, _ in sums:
            _refuse_not_finite(shard, parameter, reader)


def _refuse_not_finite(shard: Shard, parameter: Tensor, reader: HfReader) -> None:
    for piece in shard.pieces:
        if num := int((~parameter[slices(piece.target)].isfinite()).sum()):
            what = f"{num} numbers of {piece.hf} are NaN or infinite"
            raise ModelError(what, where=str(reader.path), fix="fetch the file again, or train from another checkpoint")
