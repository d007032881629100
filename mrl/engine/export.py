"""A model of any layout as one Hugging Face directory.

Rank 0 writes; every other rank sends it the parameters that no rank before it holds, one at a time. One process alone
touches the files, so they need no file system that several machines can write at once, and memory holds one
parameter beside the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.dtypes import torch_dtype
from mrl.engine.checkpoint import raise_on_all_ranks
from mrl.engine.parallel import ParallelGroups
from mrl.engine.weights import held_tensors
from mrl.models.complete import check_complete
from mrl.models.hf_writer import HfWriter
from mrl.models.layout import Layout, RankPlace
from mrl.models.regions import Region, slices
from mrl.models.spec import ModelSpec
from mrl.models.table import Head, Shard, dense_shards, expert_shards

if TYPE_CHECKING:
    from mrl.engine.engine import MegatronEngine

_MAX_FILE_BYTES = 5 * 10**9


def export(
    engine: MegatronEngine, directory: str | Path, source: str | Path, max_file_bytes: int = _MAX_FILE_BYTES
) -> None:
    """Write the model, in the engine's dtype, with the tokenizer and settings of the model directory `source`.

    Called on all ranks. The directory appears on rank 0's machine when it is whole, or not at all.
    """
    engine.memory.need("parameters")
    spec, head, groups = engine.request.spec, engine.request.head, engine.groups
    writer: HfWriter | None = None
    with raise_on_all_ranks("the export"):
        check_complete(spec, Layout.of(groups.parallel), head)
        mine = {(shard.chunk, shard.name): held for shard, held in held_tensors(engine.models, spec, head, groups)}
        if groups.at.rank == 0:
            writer = HfWriter(directory, spec, source, head, torch_dtype(engine.request.settings.dtype), max_file_bytes)
    with raise_on_all_ranks("the export"), writer or nullcontext():
        for name, box, tensor in _on_rank_0(mine, engine):
            assert writer is not None, "only rank 0 is given tensors"
            writer.write(name, tensor, box)


@torch.no_grad()
def _on_rank_0(mine: dict[tuple[int, str], Tensor], engine: MegatronEngine) -> Iterator[tuple[str, Region, Tensor]]:
    """Every box of every tensor once, on rank 0; other ranks get nothing and only send."""
    groups = engine.groups
    dtype = torch_dtype(engine.request.settings.dtype)
    come: set[tuple[str, Region]] = set()
    for holder, shard in _first_holders(engine.request.spec, engine.request.head, groups):
        new = [piece for piece in shard.pieces if (piece.hf, piece.source) not in come]
        come.update((piece.hf, piece.source) for piece in new)
        if not new or groups.at.rank not in (0, holder):
            continue
        key = (shard.chunk, shard.name)
        if holder == 0:
            tensor = mine[key]
        elif groups.at.rank == holder:
            _transfer(dist.isend, mine[key].contiguous(), 0)
            continue
        else:
            tensor = torch.empty(shard.shape, dtype=dtype, device=groups.device)
            _transfer(dist.irecv, tensor, holder)
        for piece in new:
            yield piece.hf, piece.source, tensor[slices(piece.target)]


def _first_holders(spec: ModelSpec, head: Head, groups: ParallelGroups) -> Iterator[tuple[int, Shard]]:
    """Every shard of the layout beside the first rank that holds it; known to all ranks from the table alone."""
    layout, seen = Layout.of(groups.parallel), set()
    for rank in range(groups.mesh.world_size):
        at = groups.mesh.coordinates(rank)
        place = RankPlace(tp=at.tp, pp=at.pp, ep=at.ep, etp=at.etp)
        for part, found in (
            (("dense", at.pp, at.tp), dense_shards(spec, layout, place, head)),
            (("experts", at.pp, at.ep, at.etp), expert_shards(spec, layout, place)),
        ):
            if part not in seen:
                seen.add(part)
                yield from ((rank, shard) for shard in found)


def _transfer(operation: object, tensor: Tensor, peer: int) -> None:
    # As a batch of one: only these run over NCCL's communicator of all ranks, others open one per pair.
    for request in dist.batch_isend_irecv([dist.P2POp(operation, tensor, peer)]):  # type: ignore[arg-type]
        request.wait()
