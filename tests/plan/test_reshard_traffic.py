"""Bytes counted for the links equal the transfers of the reshard's own planner."""

from __future__ import annotations

import dataclasses

import pytest

from mrl.config.mesh import Mesh
from mrl.config.schema import ParallelConfig as Layout
from mrl.dtypes import ITEM_BYTES
from mrl.models.fp8_scales import Fp8Form
from mrl.models.rollout_table import EngineSizes
from mrl.models.spec import ModelSpec
from mrl.plan.known_models import model_spec
from mrl.plan.reshard_traffic import RankTraffic, ReshardTraffic, handed_over
from mrl.weight_sync.intersections import ShardIntersections
from mrl.weight_sync.planner import BucketSizes, RankPlan, ReshardPlanner
from mrl.weight_sync.rollout_layout import RolloutLayout
from mrl.weight_sync.row_planner import sizes_for_fp8

SIZES = BucketSizes(slot_bytes=64 << 20, dtype="bfloat16", trained_dtype="bfloat16", alignment=64)
DENSE = dataclasses.replace(model_spec("Qwen2.5-0.5B"), num_layers=4, vocab=1001)
EXPERTS = model_spec("Qwen3-30B-A3B")
assert EXPERTS.moe is not None
EXPERTS = dataclasses.replace(
    EXPERTS, num_layers=4, vocab=1000, moe=dataclasses.replace(EXPERTS.moe, num_experts=8, dense_layers=frozenset({1}))
)


def moved(plan: RankPlan, nodes: tuple[int, ...]) -> RankTraffic:
    """Return the bytes that a plan receives over the links of the rank's node, and from other nodes."""
    num_bytes = {False: 0, True: 0}
    for bucket in plan.buckets:
        for source, transfers in bucket.incoming.items():
            if source != plan.rank:
                elements = sum(move.region.num_elements for move in transfers)
                num_bytes[nodes[source] != nodes[plan.rank]] += elements * ITEM_BYTES[bucket.dtype]
    return RankTraffic(link=num_bytes[False], network=num_bytes[True])


@pytest.mark.parametrize(
    ("spec", "mesh", "engine", "form"),
    [
        (DENSE, Mesh(8, tp=2, pp=2), EngineSizes(), None),  # tied embeddings, with a copy on the last stage
        (DENSE, Mesh(8, pp=4), EngineSizes(2), "block"),
        (DENSE, Mesh(8, tp=2, cp=2), EngineSizes(2), "channel"),
        (EXPERTS, Mesh(8, tp=2, ep=4), EngineSizes(4), None),
        (EXPERTS, Mesh(8, pp=2, ep=2, etp=2), EngineSizes(2), "channel"),
        (EXPERTS, Mesh(8, pp=2, ep=2, etp=2), EngineSizes(2), "block"),
        (EXPERTS, Mesh(8, ep=8), EngineSizes(), None),
        (DENSE, Mesh(8, tp=2, pp=2), EngineSizes(2, pp=2), None),
        (EXPERTS, Mesh(8, pp=2, ep=2, etp=2), EngineSizes(1, pp=4), "channel"),
    ],
    ids=str,
)
def test_traffic_is_the_planners(spec: ModelSpec, mesh: Mesh, engine: EngineSizes, form: Fp8Form | None) -> None:
    layout = Layout(tp=mesh.tp, pp=mesh.pp, ep=mesh.ep, etp=mesh.etp)
    nodes = tuple(rank // 4 for rank in range(8))
    sizes = engine if form is None else sizes_for_fp8(spec, layout, None, engine, form)
    planner = ReshardPlanner(spec, layout, mesh, RolloutLayout(sizes, tuple(range(8)), nodes))
    traffic = ReshardTraffic(ShardIntersections(spec, layout, sizes), mesh, 4, "bfloat16")
    everybody = [traffic.received(rank) for rank in range(8)]
    assert everybody == [moved(planner.plan(rank, SIZES), nodes) for rank in range(8)]
    plans = [planner.plan(rank, SIZES) for rank in range(8)]
    assert [plan.num_received() for plan in plans] == [planner.least_received(rank) for rank in range(8)]
    handed = [[SIZES.num_bytes(one.fused) for bucket in plan.buckets for one in bucket.tensors] for plan in plans]
    assert handed_over(spec, sizes, "bfloat16") == (max(map(sum, handed)), max(map(max, handed)))
    assert sum(one.link + one.network for one in everybody) > 0
    assert traffic.busiest() in everybody


def test_the_busiest_rank_is_the_one_that_waits_for_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    received = {0: RankTraffic(link=100, network=1), 1: RankTraffic(link=1, network=2)}
    monkeypatch.setattr(ReshardTraffic, "__init__", lambda self: vars(self).update(_mesh=Mesh(2), _sizes=EngineSizes()))
    monkeypatch.setattr(ReshardTraffic, "received", lambda self, rank: received[rank])
    assert ReshardTraffic().busiest() == received[1]  # type: ignore[call-arg]
