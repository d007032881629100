"""Weights from real ranks over gloo to fakes of vLLM's workers: every bit, every byte, every fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.reshard_ranks import FAULTS, RankOutcome, ReshardCase, measure
from mrl.config.schema import ParallelConfig
from mrl.models.rollout_table import EngineSizes
from mrl.verify.spawn import run_distributed
from tests.models.conftest import Tiny
from tests.weight_sync.killed_worker import send_while_one_dies

LIMIT_S = 200.0
BUCKET_BYTES = 128 << 10


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
    families = ("qwen3", "llama_tied", "qwen3_moe", "mixtral", "glm4_moe")
    dense, tied, moe, mixtral, glm = (str(tiny(family)) for family in families)
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
        ReshardCase(tied, ParallelConfig(tp=2, pp=2), EngineSizes(1, pp=2), **common, **narrow),
        ReshardCase(moe, ParallelConfig(pp=2, ep=2), EngineSizes(2, 2, pp=2), **common),
        ReshardCase(moe, ParallelConfig(pp=2, ep=2), EngineSizes(1, 2, dp=2), **common),
        # Correction biases stay float32 next to bfloat16, and routers become float32 in the engine.
        ReshardCase(glm, ParallelConfig(tp=2, pp=2), EngineSizes(2), **common, **narrow, **wide),
        ReshardCase(glm, ParallelConfig(pp=2, ep=2), EngineSizes(2, 2), **common, **wide),
        ReshardCase(glm, ParallelConfig(tp=2, ep=2), EngineSizes(1), **common, **narrow),
        ReshardCase(glm, ParallelConfig(pp=4), EngineSizes(2, whole=True), **common, **narrow, **wide),
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
