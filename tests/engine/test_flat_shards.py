"""Runs of elements as boxes of Hugging Face tensors: whatever the run, each element is named by its right place."""

from __future__ import annotations

import itertools

import pytest
import torch

from mrl.engine.flat_shards import flat_shard_regions
from mrl.models.parameters import Piece
from mrl.models.regions import slices
from mrl.models.table import Shard

HF = {"q": torch.arange(1, 61).view(10, 6), "k": torch.arange(101, 161).view(10, 6)}
"""Tensors in which no number occurs twice."""
QKV = Shard(
    chunk=0,
    name="linear_qkv.weight",
    shape=(7, 4),
    pieces=(
        Piece("q", ((5, 8), (1, 5)), ((0, 3), (0, 4))),
        Piece("k", ((2, 5), (1, 5)), ((3, 6), (0, 4))),
    ),
    padding=(((6, 7), (0, 4)),),
    expert=False,
    split=True,
)
NORM = Shard(0, "norm.weight", (6,), (Piece("v", ((4, 10),), ((0, 6),)),), (), False, False)


def local() -> torch.Tensor:
    made = torch.zeros(QKV.shape, dtype=torch.int64)
    for piece in QKV.pieces:
        made[slices(piece.target)] = HF[piece.hf][slices(piece.source)]
    return made


@pytest.mark.parametrize(("start", "stop"), [*list(itertools.combinations(range(29), 2))[::3], (0, 28)])
def test_each_element_of_a_run_is_in_one_box_at_its_place(start: int, stop: int) -> None:
    flat = local().flatten()[start:stop].clone()
    state = {"param": flat, "exp_avg": -flat}
    seen: list[int] = []
    for name, box, views in flat_shard_regions(QKV, start, state):
        assert torch.equal(views["param"], HF[name][slices(box)])
        assert torch.equal(views["exp_avg"], -views["param"])
        seen += views["param"].flatten().tolist()
    assert sorted(seen) == sorted(flat[flat > 0].tolist())


def test_a_long_run_is_an_end_whole_rows_and_a_beginning() -> None:
    boxes = [(name, box) for name, box, _ in flat_shard_regions(QKV, 2, {"param": local().flatten()[2:23]})]
    assert boxes == [
        ("q", ((5, 6), (3, 5))),
        ("q", ((6, 8), (1, 5))),
        ("k", ((2, 4), (1, 5))),
        ("k", ((4, 5), (1, 4))),
    ]


def test_a_run_of_a_vector() -> None:
    values = torch.tensor([1.0, 2.0, 3.0])
    ((name, box, views),) = flat_shard_regions(NORM, 2, {"param": values})
    assert (name, box) == ("v", ((6, 9),))
    assert torch.equal(views["param"], values)


def test_what_is_written_to_a_view_is_in_the_run() -> None:
    state = {"param": torch.zeros(21)}
    for _, _, views in flat_shard_regions(QKV, 2, state):
        views["param"].fill_(1)
    assert state["param"].tolist() == [1.0] * 21
