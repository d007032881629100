"""Plans: every element arrives at vLLM's position, no transfer is unnecessary, and each rank plans alone and fast."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from mrl.config.mesh import Mesh
from mrl.config.schema import ParallelConfig as Layout
from mrl.errors import ModelError, PlacementError
from mrl.models.families import read_spec, spec_of
from mrl.models.hf_config import HfConfig
from mrl.models.layout import RankPlace
from mrl.models.regions import slices
from mrl.models.rollout_table import EngineSizes, Fused, rollout_tensors
from mrl.models.spec import ModelSpec
from mrl.models.table import Shard, hf_tensors, shards_of
from mrl.weight_sync.planner import BucketSizes, RankPlan, ReshardPlanner, Transfer
from mrl.weight_sync.rollout_layout import RolloutLayout
from tests.models import published
from tests.models.conftest import Tiny

Ids = npt.NDArray[np.int64]
SIZES = BucketSizes(slot_bytes=32 << 10, dtype="float32", trained_dtype="float32", alignment=64)

CASES = [
    ("qwen3", Mesh(4, tp=2, pp=2), Layout(tp=2, pp=2), EngineSizes(2)),
    ("qwen3", Mesh(4, tp=2, pp=2), Layout(tp=2, pp=2), EngineSizes(4)),
    ("llama", Mesh(4, tp=4), Layout(tp=4), EngineSizes(1)),
    ("llama", Mesh(8, tp=2, pp=2, cp=2), Layout(tp=2, pp=2, vpp=2), EngineSizes(4)),
    ("llama_tied", Mesh(4, pp=4), Layout(pp=4), EngineSizes(2)),
    ("llama_tied", Mesh(4, tp=2, pp=2), Layout(tp=2, pp=2), EngineSizes(1)),
    ("qwen2", Mesh(6, tp=2, pp=3), Layout(tp=2, pp=3, first_stage_layers=1, last_stage_layers=1), EngineSizes(2)),
    ("mistral", Mesh(4), Layout(), EngineSizes(4)),
    ("qwen3_moe", Mesh(4, tp=2, ep=2), Layout(tp=2, ep=2), EngineSizes(4)),
    ("qwen3_moe", Mesh(8, pp=2, ep=4), Layout(pp=2, vpp=2, ep=4), EngineSizes(2, 2)),
    ("mixtral", Mesh(8, tp=2, pp=2, ep=2, etp=2), Layout(tp=2, pp=2, ep=2, etp=2), EngineSizes(4, 4)),
    ("mixtral", Mesh(8, tp=4, ep=2), Layout(tp=4, ep=2), EngineSizes(1)),
    ("mixtral", Mesh(4, tp=2, pp=2), Layout(tp=2, pp=2), EngineSizes(2, whole=True)),
    ("llama_tied", Mesh(4, tp=2, pp=2), Layout(tp=2, pp=2), EngineSizes(4, whole=True)),
    ("llama_tied", Mesh(4, tp=2, pp=2), Layout(tp=2, pp=2), EngineSizes(1, pp=2)),
    ("qwen2", Mesh(8, tp=2, pp=2), Layout(tp=2, pp=2), EngineSizes(2, pp=4)),
    ("qwen3_moe", Mesh(8, pp=2, ep=4), Layout(pp=2, vpp=2, ep=4), EngineSizes(2, 2, pp=2)),
    ("llama", Mesh(8, tp=2, pp=4), Layout(tp=2, pp=4), EngineSizes(1, pp=3)),
    ("qwen3_moe", Mesh(4, tp=2, ep=2), Layout(tp=2, ep=2), EngineSizes(1, 2, dp=2)),
    ("glm4_moe", Mesh(4, pp=2, ep=2), Layout(pp=2, ep=2), EngineSizes(1, 4, dp=4)),
]


def numbered(spec: ModelSpec) -> dict[str, Ids]:
    """Return tensors in which no number occurs twice."""
    tensors, first = {}, 1
    for name, shape in hf_tensors(spec, "lm").items():
        count = int(np.prod(shape))
        tensors[name] = np.arange(first, first + count).reshape(shape)
        first += count
    return tensors


def assembled(made: Shard | Fused, hf: dict[str, Ids]) -> Ids:
    tensor = np.zeros(made.shape, np.int64)
    matrix = tensor.reshape(made.place) if isinstance(made, Fused) else tensor
    for piece in made.pieces:
        matrix[slices(piece.target)] = hf[piece.hf][slices(piece.source)]
    return tensor


def local_parameters(spec: ModelSpec, layout: Layout, mesh: Mesh, rank: int) -> dict[tuple[int, str], Ids]:
    at, hf = mesh.coordinates(rank), numbered(spec)
    shards = shards_of(spec, layout, RankPlace(at.tp, at.pp, at.ep, at.etp), "lm")
    return {(shard.chunk, shard.name): assembled(shard, hf) for shard in shards}


def rollout_of(mesh: Mesh, sizes: EngineSizes, ranks_per_node: int = 8) -> RolloutLayout:
    hosts = tuple(range(mesh.world_size // sizes.num_workers * sizes.num_workers))
    return RolloutLayout(sizes, hosts, tuple(rank // ranks_per_node for rank in range(mesh.world_size)))


@pytest.mark.parametrize(
    ("family", "mesh", "layout", "sizes", "has_own_pool"),
    [(*case, number % 2 == 1) for number, case in enumerate([*CASES, CASES[1], CASES[8]])],
    ids=str,
)
def test_what_is_planned_assembles_every_worker(
    tiny: Tiny, family: str, mesh: Mesh, layout: Layout, sizes: EngineSizes, has_own_pool: bool
) -> None:
    spec = read_spec(tiny(family))
    rollout = rollout_of(mesh, sizes, 2)
    if has_own_pool:
        nodes = tuple(rank // 2 for rank in range(2 * mesh.world_size))
        rollout = RolloutLayout(sizes, tuple(mesh.world_size + host for host in rollout.hosts), nodes)
    planner = ReshardPlanner(spec, layout, mesh, rollout)
    local = [local_parameters(spec, layout, mesh, rank) for rank in range(mesh.world_size)]
    plans = [planner.plan(rank, SIZES) for rank in range(len(rollout.nodes))]
    for plan in plans:
        if plan.worker is None:
            continue
        expected = {f.name: assembled(f, numbered(spec)) for f in rollout_tensors(spec, sizes, plan.worker)}
        for bucket in plan.buckets:
            made = [np.zeros(tensor.fused.place, np.int64) for tensor in bucket.tensors]
            for source, transfers in bucket.incoming.items():
                for site, tensor_number, region in transfers:
                    matrix = made[tensor_number]
                    for name, source_box, target_box in region.copies:
                        assert not matrix[slices(target_box)].any(), "written twice"
                        parameter = local[source][site.chunk, site.prefix + name]
                        matrix[slices(target_box)] = parameter[slices(source_box)]
            for tensor, array in zip(bucket.tensors, made, strict=True):
                whole = expected.pop(tensor.name).reshape(array.shape)
                np.testing.assert_array_equal(array, whole, tensor.name)
        assert not expected
        assert plan.num_received() == planner.least_received(plan.rank)
    assert_agreed(plans)


@pytest.mark.parametrize("in_step", [False, True])
def test_workers_of_an_engine_can_take_the_layers_in_one_order(tiny: Tiny, in_step: bool) -> None:
    """Two engines, each on devices of both stages. Without a common order, each worker begins with its own stage."""
    spec, layout, mesh = read_spec(tiny("llama")), Layout(pp=2), Mesh(4, pp=2)
    rollout = replace(rollout_of(mesh, EngineSizes(2)), hosts=(0, 2, 3, 1), in_step=in_step)
    planner = ReshardPlanner(spec, layout, mesh, rollout)
    plans = [planner.plan(rank, SIZES) for rank in range(4)]
    assert_agreed(plans)
    orders = [[tensor.name for bucket in plan.buckets for tensor in bucket.tensors] for plan in plans]
    counts = [[len(bucket.tensors) for bucket in plan.buckets] for plan in plans]
    firsts = [order[0] for order in orders]
    assert [sorted(order) for order in orders] == [sorted(orders[0])] * 4
    assert (orders[0] == orders[2], orders[3] == orders[1]) == (in_step, in_step)
    assert firsts[0] != firsts[3]  # the engines still begin with different stages
    assert not in_step or (counts[0], counts[3]) == (counts[2], counts[1])


def assert_agreed(plans: list[RankPlan]) -> None:
    """Check that each rank expects exactly what the other sends, in the same order."""
    for plan in plans:
        assert len(plan.buckets) == len(plans[0].buckets)
        for number, bucket in enumerate(plan.buckets):
            for other in plans:
                if other.rank != plan.rank:
                    awaited = other.buckets[number].incoming.get(plan.rank, [])
                    assert bucket.outgoing.get(other.rank, []) == awaited


def test_no_tensor_stands_out_of_its_slot_whatever_the_slot_holds(tiny: Tiny) -> None:
    """Slots of every size near a tensor's end, where the remaining space for alignment matters."""
    spec, mesh = read_spec(tiny("qwen3")), Mesh(1)
    planner = ReshardPlanner(spec, Layout(), mesh, rollout_of(mesh, EngineSizes(1)))
    whole = planner.plan(0, BucketSizes(1 << 30, "bfloat16", "bfloat16", 4096)).buckets[0].tensors
    for last in whole:
        end = last.offset + 2 * int(np.prod(last.fused.shape))
        for slot_bytes in (end - 2, end, end + 2, end + 4000):
            for bucket in planner.plan(0, BucketSizes(slot_bytes, "bfloat16", "bfloat16", 4096)).buckets:
                ends = [tensor.offset + 2 * int(np.prod(tensor.fused.shape)) for tensor in bucket.tensors]
                assert len(ends) == 1 or ends[-1] <= slot_bytes
                starts = [tensor.offset for tensor in bucket.tensors]
                assert not any(start % 4096 for start in starts)
                assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))


def test_the_lower_bound_is_what_a_set_of_numbers_says(tiny: Tiny) -> None:
    for family, mesh, layout, sizes in CASES:
        spec = read_spec(tiny(family))
        planner, hf = ReshardPlanner(spec, layout, mesh, rollout_of(mesh, sizes)), numbered(spec)
        for rank in (0, mesh.world_size - 1):
            if rank not in planner.rollout.hosts:
                continue
            own = np.concatenate([a.ravel() for a in local_parameters(spec, layout, mesh, rank).values()])
            needed = [assembled(f, hf).ravel() for f in rollout_tensors(spec, sizes, rank)]
            lacking = np.setdiff1d(np.concatenate(needed), own)
            assert planner.least_received(rank) == lacking.size - (0 in lacking), (family, rank)


def test_a_copy_on_the_own_node_is_nearer_and_copies_share_the_work(tiny: Tiny) -> None:
    spec, mesh = read_spec(tiny("llama")), Mesh(8, tp=2)
    planner = ReshardPlanner(spec, Layout(tp=2), mesh, rollout_of(mesh, EngineSizes(1), ranks_per_node=4))
    sent = np.zeros((8, 8), np.int64)
    for rank in range(8):
        for bucket in planner.plan(rank, SIZES).buckets:
            for destination, transfers in bucket.outgoing.items():
                sent[rank, destination] += sum(transfer.region.num_elements for transfer in transfers)
    assert not sent[:4, 4:].any()
    assert not sent[4:, :4].any()
    from_each = sent.sum(axis=1)
    assert from_each.max() < 1.3 * from_each.mean()


def test_each_stage_serves_another_part_of_the_workers_at_any_time(tiny: Tiny) -> None:
    """Otherwise all workers would wait for one stage after another."""
    spec, mesh = read_spec(tiny("llama")), Mesh(4, pp=4)
    planner = ReshardPlanner(spec, Layout(pp=4), mesh, rollout_of(mesh, EngineSizes(1)))
    plans = [planner.plan(rank, BucketSizes(1, "float32", "float32", 64)) for rank in range(4)]
    for number in range(len(plans[0].buckets)):
        sources = [set(plan.buckets[number].incoming) for plan in plans]
        assert len(set.union(*sources)) >= 3, (number, sources)


def num_slices(buckets: list[dict[int, list[Transfer]]]) -> int:
    return sum(
        len(transfer.region.copies) for bucket in buckets for transfers in bucket.values() for transfer in transfers
    )


@pytest.mark.parametrize("world", [1024, 16384])
def test_a_rank_of_a_large_world_plans_within_a_second_and_has_few_peers(world: int) -> None:
    """Sixty-one layers of 256 experts, 47,000 tensors."""
    large = {**published.QWEN3_235B, "num_hidden_layers": 61, "num_experts": 256, "mlp_only_layers": [0, 1, 2]}
    spec = spec_of(HfConfig(large, "config.json"))
    assert len(hf_tensors(spec, "lm")) > 45_000
    layout = Layout(pp=16, ep=16, first_stage_layers=3, last_stage_layers=2)
    mesh = Mesh(world, pp=16, ep=16)
    seconds = []
    for _ in range(3):  # the quickest: others may be using the machine
        planner = ReshardPlanner(spec, layout, mesh, rollout_of(mesh, EngineSizes(32), ranks_per_node=8))
        start = time.process_time()
        plan = planner.plan(world // 2 + 5, BucketSizes(256 << 20, "bfloat16", "bfloat16", 64))
        seconds.append(time.process_time() - start)
    assert min(seconds) < 1
    assert num_slices([bucket.incoming for bucket in plan.buckets]) > 45_000
    assert num_slices([bucket.outgoing for bucket in plan.buckets]) > 30_000
    peers = {peer for bucket in plan.buckets for peer in (*bucket.incoming, *bucket.outgoing)}
    assert len(peers) < 600, "a worker needs the experts of 16 ranks in each of 16 stages"


def test_no_copy_is_idle_where_copies_outnumber_engines(tiny: Tiny) -> None:
    """Eight trainer ranks, each with everything, and two engines elsewhere."""
    spec, mesh = read_spec(tiny("llama")), Mesh(8)
    planner = ReshardPlanner(spec, Layout(), mesh, RolloutLayout(EngineSizes(1), (8, 9), (*[0] * 8, 1, 1)))
    sent = [
        sum(len(transfers) for bucket in planner.plan(rank, SIZES).buckets for transfers in bucket.outgoing.values())
        for rank in range(8)
    ]
    assert min(sent) > 0, sent


@pytest.mark.parametrize(
    ("hosts", "nodes", "message"),
    [
        ((0, 1, 2), (0,) * 4, "3 workers are not divisible into engines of tp 2"),
        ((0, 0), (0,) * 4, "each needs its own of the 4 ranks"),
        ((3, 4), (0,) * 4, "each needs its own of the 4 ranks"),
        ((0, 1), (0,) * 3, "3 ranks have a node, but there are 4 trainer ranks"),
    ],
)
def test_engines_that_the_devices_do_not_fit(
    tiny: Tiny, hosts: tuple[int, ...], nodes: tuple[int, ...], message: str
) -> None:
    with pytest.raises(PlacementError, match=message):
        ReshardPlanner(read_spec(tiny("llama")), Layout(), Mesh(4), RolloutLayout(EngineSizes(2), hosts, nodes))


def test_engines_that_the_model_does_not_fit(tiny: Tiny) -> None:
    with pytest.raises(ModelError, match="tp 3 does not divide"):
        ReshardPlanner(read_spec(tiny("llama")), Layout(), Mesh(3), RolloutLayout(EngineSizes(3), (0, 1, 2), (0, 0, 0)))
