from __future__ import annotations

import itertools

import pytest

from mrl.config.mesh import Mesh
from mrl.errors import PlacementError

LAYOUTS = [
    (world, tp, cp, pp, ep, etp)
    for world, tp, cp, pp, ep, etp in itertools.product([1, 2, 4, 8, 16], [1, 2, 4], [1, 2], [1, 2], [1, 2, 4], [1, 2])
    if world % (tp * cp * pp) == 0 and world % (etp * ep * pp) == 0
]


@pytest.mark.parametrize(("world", "tp", "cp", "pp", "ep", "etp"), LAYOUTS)
def test_ranks_stand_where_megatron_puts_them(world: int, tp: int, cp: int, pp: int, ep: int, etp: int) -> None:
    """Compare with Megatron's rank generator: the n-th rank of a group has coordinate n on its axis."""
    parallel_state = pytest.importorskip("megatron.core.parallel_state")
    mesh = Mesh(world, tp, cp, pp, ep, etp)
    dense = parallel_state.RankGenerator(tp=tp, ep=1, dp=mesh.dp, pp=pp, cp=cp, order="tp-cp-ep-dp-pp")
    expert = parallel_state.RankGenerator(tp=etp, ep=ep, dp=mesh.edp, pp=pp, cp=1, order="tp-cp-ep-dp-pp")
    for generator, names in (
        (dense, {"tp": "tp", "cp": "cp", "dp": "dp", "pp": "pp"}),
        (expert, {"tp": "etp", "ep": "ep", "dp": "edp"}),
    ):
        for megatron_name, name in names.items():
            for group in generator.get_ranks(megatron_name):
                assert [getattr(mesh.coordinates(rank), name) for rank in group] == list(range(len(group)))


def test_one_rank_answers_for_each_shard() -> None:
    mesh = Mesh(16, tp=2, cp=2, pp=2)
    speakers = [rank for rank in range(16) if mesh.is_output_rank(rank)]
    assert [mesh.coordinates(rank).dp for rank in speakers] == [0, 1]
    assert all(mesh.coordinates(rank).pp == 1 for rank in speakers)


def test_a_layout_that_does_not_fit_says_what_would() -> None:
    with pytest.raises(
        PlacementError, match=r"6 devices are not a multiple of tp x cp x pp = 4\n  fix: give the role 4 devices"
    ):
        Mesh(6, tp=4)
    with pytest.raises(PlacementError, match=r"etp x ep x pp = 8"):
        Mesh(4, tp=2, ep=8)
