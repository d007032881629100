"""A rank has the rows that torch gives it, and all ranks together have every number once."""

from __future__ import annotations

import pytest
import torch

from mrl.models.regions import is_exact_cover
from mrl.models.row_shards import row_shards, rows_of_rank

TENSORS = {
    "model.embed_tokens.weight": (131, 8),
    "model.norm.weight": (5,),
    "model.layers.0.mlp.gate.bias": (4,),
    **{f"model.layers.0.mlp.experts.{expert}.up_proj.weight": (6, 8) for expert in range(5)},
}


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_rows_are_those_of_torch(size: int) -> None:
    for rows in (1, 2, 5, 131):
        chunks = torch.arange(rows).chunk(size)
        found = [list(range(*rows_of_rank(rows, rank, size))) for rank in range(size)]
        assert found == [*(chunk.tolist() for chunk in chunks), *[[]] * (size - len(chunks))]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_all_ranks_together_hold_every_number_once(size: int) -> None:
    untrained = {"model.layers.0.mlp.gate.bias"}
    by_rank = [list(row_shards(TENSORS, untrained, rank, size)) for rank in range(size)]
    for name, shape in TENSORS.items():
        boxes = [shard.pieces[0].source for shards in by_rank for shard in shards if shard.name == name]
        if name in untrained:
            assert boxes == [((0, 4),)] * size, "every rank has a buffer"
        else:
            assert is_exact_cover(shape, boxes)
            assert ".experts." not in name or len(boxes) == 1, "an expert is whole"
