"""Plans from a trainer that torch shards: every element arrives at vLLM's position, and none moves twice."""

from __future__ import annotations

import numpy as np
import pytest

from mrl.config.mesh import Mesh
from mrl.models.families import read_spec
from mrl.models.regions import slices
from mrl.models.rollout_table import EngineSizes, rollout_tensors
from mrl.weight_sync.rollout_layout import RolloutLayout
from mrl.weight_sync.row_planner import RowPlanner
from tests.models.conftest import Tiny
from tests.weight_sync.test_planner import SIZES, assembled, assert_agreed, numbered, rollout_of

CASES = [
    ("qwen3", 2, 2, EngineSizes(1)),
    ("qwen3", 4, 4, EngineSizes(2)),
    ("llama_tied", 3, 3, EngineSizes(1)),  # rows that do not divide
    ("qwen3_moe", 4, 2, EngineSizes(2)),  # two copies
    ("glm4_moe", 3, 3, EngineSizes(1)),  # experts that do not divide, and a buffer that all ranks hold
    ("deepseek_v3", 2, 2, EngineSizes(2)),
    ("mixtral", 8, 8, EngineSizes(2, whole=True)),  # more ranks than experts
    ("llama_tied", 3, 3, EngineSizes(1, fp8="channel")),
    ("llama_tied", 3, 3, EngineSizes(1, pp=3)),
    ("qwen3_moe", 4, 2, EngineSizes(2, fp8="channel")),
]


@pytest.mark.parametrize("has_own_pool", [False, True])
@pytest.mark.parametrize(("family", "num_ranks", "shard_size", "sizes"), CASES, ids=str)
def test_rows_of_all_ranks_make_up_every_worker(
    tiny: Tiny, family: str, num_ranks: int, shard_size: int, sizes: EngineSizes, has_own_pool: bool
) -> None:
    spec = read_spec(tiny(family))
    rollout = rollout_of(Mesh(num_ranks), sizes, 2)
    if has_own_pool:
        nodes = tuple(rank // 2 for rank in range(2 * num_ranks))
        rollout = RolloutLayout(sizes, tuple(num_ranks + host for host in rollout.hosts), nodes)
    planner = RowPlanner(spec, num_ranks, shard_size, rollout)
    hf = numbered(spec)
    local = [{shard.name: assembled(shard, hf) for shard in planner.shards(rank)} for rank in range(num_ranks)]
    if sizes.fp8:  # the scales of rows lie as the rows do
        for tensors in (hf, *local):
            tensors |= {f"{name}_scale": rows[:, :1] for name, rows in tensors.items() if rows.ndim == 2}
    held = sum(sum(tensor.size for tensor in tensors.values()) for tensors in local[:shard_size])
    assert held < 1.02 * sum(tensor.size for tensor in hf.values()), "ranks of one copy hold each number once"
    plans = [planner.plan(rank, SIZES) for rank in range(len(rollout.nodes))]
    for plan in plans:
        if plan.worker is None:
            continue
        expected = {f.name: assembled(f, hf) for f in rollout_tensors(spec, sizes, plan.worker)}
        for bucket in plan.buckets:
            made = [np.zeros(tensor.fused.place, np.int64) for tensor in bucket.tensors]
            for source, transfers in bucket.incoming.items():
                for site, number, region in transfers:
                    for name, source_box, target_box in region.copies:
                        assert not made[number][slices(target_box)].any(), "written twice"
                        made[number][slices(target_box)] = local[source][site.prefix + name][slices(source_box)]
            for tensor, array in zip(bucket.tensors, made, strict=True):
                np.testing.assert_array_equal(array, expected.pop(tensor.name).reshape(array.shape), tensor.name)
        assert not expected
        assert plan.num_received() == planner.least_received(plan.rank)
    assert_agreed(plans)
