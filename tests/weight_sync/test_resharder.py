"""Weights from real ranks over gloo to fakes of vLLM's workers: every bit, every byte, every fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.reshard_ranks import FAULTS, RankOutcome, ReshardCase, measure
from mrl.config.mesh import Mesh
from mrl.config.schema import ParallelConfig
from mrl.config.schema import ParallelConfig as Layout
from mrl.models.families import read_spec
from mrl.models.regions import num_elements
from mrl.models.rollout_table import EngineSizes
from mrl.verify.spawn import run_distributed
from mrl.weight_sync.exchange import split_messages
from mrl.weight_sync.intersections import RegionCopy, ShardRegion
from mrl.weight_sync.planner import BucketSizes, ParameterSite, ReshardPlanner, RolloutLayout, Transfer
from tests.models.conftest import Tiny
from tests.weight_sync.killed_worker import send_while_one_dies

LIMIT_S = 200.0
BUCKET_BYTES = 96 << 10


def world(num_ranks: int, cases: list[ReshardCase]) -> list[list[RankOutcome]]:
    """Return the ranks of each case."""
    by_rank = run_distributed(num_ranks, measure, cases, timeout_s=LIMIT_S)
    return [list(ranks) for ranks in zip(*by_rank, strict=True)]


def assert_arrived(ranks: list[RankOutcome], bucket_bytes: int) -> None:
    for outcome in ranks:
        report = outcome.report
        assert report is not None, outcome.error
        assert (outcome.wrong, outcome.error, report.failure) == ([], "", "")
        assert report.bytes_received == report.least_bytes
        assert report.extra_bytes <= 2 * bucket_bytes
    reports = [outcome.report for outcome in ranks if outcome.report]
    assert sum(report.bytes_sent for report in reports) == sum(report.bytes_received for report in reports) > 0


def test_every_worker_holds_its_shard_to_the_bit(tiny: Tiny, tmp_path: Path) -> None:
    dense, tied, moe, mixtral = (str(tiny(family)) for family in ("qwen3", "llama_tied", "qwen3_moe", "mixtral"))
    common: dict[str, Any] = {"bucket_bytes": BUCKET_BYTES, "sockets": str(tmp_path)}
    narrow, wide = {"dtype": torch.bfloat16}, {"train_dtype": torch.bfloat16}
    cases = [
        ReshardCase(dense, ParallelConfig(tp=2, pp=2), EngineSizes(2), **common),
        ReshardCase(dense, ParallelConfig(tp=2), EngineSizes(4), ranks_per_node=2, **common, **narrow),
        ReshardCase(tied, ParallelConfig(pp=4), EngineSizes(1), **common, **wide),
        ReshardCase(tied, ParallelConfig(pp=2, vpp=2), EngineSizes(4), **common),
        ReshardCase(moe, ParallelConfig(tp=2, ep=2), EngineSizes(4), **common),
        ReshardCase(moe, ParallelConfig(pp=2, ep=2), EngineSizes(2, 2), **common),
        ReshardCase(mixtral, ParallelConfig(tp=2, ep=2, etp=2), EngineSizes(4, 4), **common),
        ReshardCase(moe, ParallelConfig(tp=2, pp=2), EngineSizes(2, whole=True), **common),
    ]
    for ranks in world(4, cases):
        assert_arrived(ranks, BUCKET_BYTES)


def test_engines_with_devices_of_their_own_get_all_from_the_network(tiny: Tiny, tmp_path: Path) -> None:
    dense, moe = str(tiny("qwen3")), str(tiny("qwen3_moe"))
    common: dict[str, Any] = {"bucket_bytes": BUCKET_BYTES, "sockets": str(tmp_path), "num_receivers": 2}
    cases = [
        ReshardCase(dense, ParallelConfig(tp=2), EngineSizes(1), **common),
        ReshardCase(moe, ParallelConfig(pp=2), EngineSizes(2), ranks_per_node=2, **common),
    ]
    for ranks in world(4, cases):
        assert_arrived(ranks, BUCKET_BYTES)
        reports = [outcome.report for outcome in ranks if outcome.report]
        assert [report.bytes_received > 0 for report in reports] == [False, False, True, True]


def test_every_fault_of_a_worker_is_seen_and_named(tiny: Tiny, tmp_path: Path) -> None:
    cases = [
        ReshardCase(
            str(tiny("qwen3_moe")), ParallelConfig(tp=2), EngineSizes(2), BUCKET_BYTES, str(tmp_path), fault=name
        )
        for name in FAULTS
    ]
    outcomes = dict(zip(FAULTS, world(2, cases), strict=True))
    whose = "rollout worker 0 does not hold version 2 as it was sent: "
    layers = "model.layers."
    expected = {
        "one element flipped": f"{whose}1 differ: `{layers}2.self_attn.o_proj.weight`",
        "one bucket skipped": f"{whose}",
        "q and k swapped": f"{whose}1 differ: `{layers}1.self_attn.qkv_proj.weight`",
        "one expert stale": f"{whose}1 differ: `{layers}3.mlp.experts.routed_experts.w13_weight`",
    }
    for name, (with_fault, without) in outcomes.items():
        assert with_fault.error.startswith(expected[name]), with_fault.error
        assert without.error == ""
    skipped = outcomes["one bucket skipped"][0]
    assert f"{len(skipped.wrong)} are missing: `{skipped.wrong[0]}`" in skipped.error


def test_a_worker_that_is_killed_costs_no_other_rank_and_its_successor_gets_the_version(
    tiny: Tiny, tmp_path: Path
) -> None:
    case = ReshardCase(str(tiny("llama")), ParallelConfig(tp=2), EngineSizes(1), BUCKET_BYTES, str(tmp_path))
    ranks = run_distributed(4, send_while_one_dies, case, timeout_s=LIMIT_S)
    firsts, seconds = ([reports[number] for reports, _ in ranks] for number in (0, 1))
    assert [bool(report.failure) for report in firsts] == [False, True, False, False]
    assert firsts[1].failure.startswith("rollout worker 1 ")
    assert "disconnected" in firsts[1].failure
    assert [report.worker for report in seconds] == [None, 1, None, None]
    assert [report.failure for report in seconds] == [""] * 4
    assert [report.bytes_received > 0 for report in seconds] == [False, True, False, False]
    names = [held for _, held in ranks]
    assert names == [names[0]] * 4
    assert names[0]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_the_weights_of_real_megatron_models(tiny: Tiny, family: str, tmp_path: Path) -> None:
    moe = family == "qwen3_moe"
    layouts = [ParallelConfig(tp=2, pp=2), ParallelConfig(pp=2, vpp=2, ep=2 if moe else 1), ParallelConfig(tp=2)]
    cases = [
        ReshardCase(str(tiny(family)), layout, EngineSizes(2), BUCKET_BYTES, str(tmp_path), megatron=True)
        for layout in layouts
    ]
    for ranks in world(4, cases):
        assert_arrived(ranks, BUCKET_BYTES)


def test_messages_are_bounded_and_full(tiny: Tiny) -> None:
    spec = read_spec(tiny("llama"))
    planner = ReshardPlanner(spec, Layout(pp=2), Mesh(2, pp=2), RolloutLayout(EngineSizes(1), (0, 1), (0, 0)))
    plan = planner.plan(0, BucketSizes(64 << 10, 4, 64))
    for bucket in plan.buckets:
        transfers = bucket.outgoing.get(1, [])
        total = sum(move.region.num_elements for move in transfers)
        runs = split_messages(transfers, 1000)
        sizes = [sum(move.region.num_elements for move in run) for run in runs]
        assert all(size <= 1000 for size in sizes)
        assert sum(sizes) == total
        assert len(runs) <= total // (1000 - spec.hidden) + 1
        assert covered(runs) == covered([transfers])


def covered(runs: list[list[Transfer]]) -> dict[tuple[ParameterSite, int, str], int]:
    """Return a checksum over the positions of each parameter's moved elements, to detect missing or repeated rows."""
    found: dict[tuple[ParameterSite, int, str], int] = {}
    for run in runs:
        for move in run:
            for each in move.region.copies:
                key = (move.site, move.tensor, each.name)
                found[key] = found.get(key, 0) + sum(range(*each.source[0])) + 7 * sum(range(*each.target[0]))
                assert num_elements(each.source) == num_elements(each.target)
    return found


def test_a_slice_is_cut_between_rows() -> None:
    each = RegionCopy("weight", ((4, 9), (2, 5)), ((0, 5), (0, 3)))
    move = Transfer(ParameterSite(0, 0, ""), 3, ShardRegion((each,), 15))
    rows = [(run[0].region.copies[0].source[0], run[0].region.copies[0].target[0]) for run in split_messages([move], 7)]
    assert rows == [((4, 6), (0, 2)), ((6, 8), (2, 4)), ((8, 9), (4, 5))]
    assert split_messages([], 7) == []
    assert split_messages([move], 15) == [[move]]
