"""Layouts compared with transformers and one rank, and seeded faults: a subset of `benchmarks/parity.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.parity_faults import FAULTS, measure_with_fault
from mrl.algos.aggregate import AGGREGATIONS
from mrl.config.schema import ParallelConfig as Layout
from mrl.models.families import read_spec
from mrl.verify.layout import score_difference, tolerance
from mrl.verify.parity import (
    Difference,
    ParityCase,
    ParityResult,
    RankResult,
    measure,
    merge_ranks,
    transformers_scores,
)
from mrl.verify.spawn import run_distributed
from tests.models.tiny_models import make_tiny

LIMIT_S = 300.0
LAYOUTS = {
    "qwen3": [Layout(tp=2, pp=2), Layout(tp=4), Layout(pp=2, vpp=2), Layout(tp=2, cp=2, sequence_parallel=True)],
    "qwen3_moe": [
        Layout(tp=2, ep=2, sequence_parallel=True),
        Layout(pp=2, ep=2, first_stage_layers=1),
        Layout(tp=2, sequence_parallel=True),
    ],
    "glm4_moe": [
        Layout(tp=2, ep=2, sequence_parallel=True),
        Layout(pp=2, vpp=2, ep=2),  # the stage with the layer without experts has fewer routers
        Layout(tp=2, cp=2, sequence_parallel=True),
    ],
    "deepseek_v3": [
        Layout(tp=2, ep=2, sequence_parallel=True),  # each rank has some heads, and the latents whole
        Layout(pp=2, vpp=2, ep=2),
        Layout(tp=2, cp=2, sequence_parallel=True),
    ],
    "gpt_oss": [
        Layout(tp=2, ep=2, sequence_parallel=True),  # each rank has the biases of its experts, and some sinks
        Layout(pp=2, vpp=2, ep=2),  # windows by the number of the layer in the whole model
        Layout(tp=2, cp=2, sequence_parallel=True),
    ],
    "qwen3_5_text": [
        Layout(tp=2, pp=2),  # without sequence parallelism
        Layout(pp=2, vpp=2),
        Layout(tp=2, sequence_parallel=True),
    ],
    "qwen3_5_moe_text": [Layout(tp=2, ep=2, sequence_parallel=True), Layout(pp=2, ep=2)],
    "qwen3_next": [Layout(tp=2, sequence_parallel=True)],
}
MODES = sorted(AGGREGATIONS)


def results(size: int, cases: list[ParityCase]) -> list[ParityResult]:
    by_rank = run_distributed(size, measure, cases, timeout_s=LIMIT_S)
    return [merge_ranks(list(ranks)) for ranks in zip(*by_rank, strict=True)]


def assert_equal(one: ParityResult, other: ParityResult) -> None:
    difference = Difference.between(one, other)
    assert difference.scores < 2e-5, difference
    assert max(difference.loss, difference.grad_norm) < 1e-5, difference
    assert difference.parameters < 1e-5, difference


@pytest.mark.parametrize("family", LAYOUTS)
def test_layouts_equal_transformers_and_one_rank(family: str, tmp_path: Path) -> None:
    model = str(make_tiny(family, tmp_path / family))
    (one,) = results(1, [ParityCase(model, "lm", Layout(), 1000)])
    assert np.abs(one.scores - transformers_scores(model, ParityCase(model, "lm", Layout(), 1000))).max() < 2e-5
    budgets = cycle((64, 1000))
    cases = [ParityCase(model, "lm", layout, next(budgets)) for layout in LAYOUTS[family]]
    for other in results(4, cases):
        assert_equal(one, other)


def test_values_of_a_critic(tmp_path: Path) -> None:
    model = str(make_tiny("llama", tmp_path / "llama", 0, "score"))
    (one,) = results(1, [ParityCase(model, "score", Layout(), 1000)])
    assert np.abs(one.scores - transformers_scores(model, ParityCase(model, "score", Layout(), 1000))).max() < 2e-5
    layouts = [Layout(tp=2, sequence_parallel=True), Layout(pp=2), Layout(tp=2, cp=2), Layout()]
    for other in results(4, [ParityCase(model, "score", layout, 64) for layout in layouts]):
        assert_equal(one, other)


def test_every_aggregation_is_the_same_however_the_batch_is_cut(tmp_path: Path) -> None:
    model = str(make_tiny("qwen2", tmp_path / "qwen2"))
    ones = results(1, [ParityCase(model, "lm", Layout(), 1000, mode) for mode in MODES])
    others = results(2, [ParityCase(model, "lm", Layout(cp=size), 64, mode) for mode in MODES for size in (1, 2)])
    for number, other in enumerate(others):
        assert_equal(ones[number // 2], other)
    assert len({result.losses for result in ones}) == len(MODES)


def test_recomputation_changes_nothing(tmp_path: Path) -> None:
    model = str(make_tiny("qwen3", tmp_path / "qwen3"))
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    settings = [{}, full, {"recompute_granularity": "selective"}]
    one, *others = results(1, [ParityCase(model, "lm", Layout(), 64, megatron=own) for own in settings])
    for other in others:
        assert_equal(one, other)


def measure_with_faults(cases: Mapping[str, ParityCase]) -> list[RankResult]:
    """Run each case on one rank, with the fault of the same name."""
    return [measure_with_fault(name, case) for name, case in cases.items()]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.on_demand)])
def test_every_seeded_fault_shows(dtype: Any, tmp_path: Path) -> None:
    alone = {}
    for number, (name, fault) in enumerate(FAULTS.items()):
        model = make_tiny(fault.family, tmp_path / str(number), 0, fault.head)
        alone[name] = ParityCase(str(model), fault.head, Layout(), 64, dtype=dtype)
    cases = {name: replace(case, parallel=FAULTS[name].layout) for name, case in alone.items()}
    by_rank = run_distributed(2, measure_with_faults, cases, timeout_s=LIMIT_S)
    found = dict(zip(FAULTS, (merge_ranks(list(ranks)) for ranks in zip(*by_rank, strict=True)), strict=True))
    for (name, case), one in zip(alone.items(), results(1, list(alone.values())), strict=True):
        oracle, difference = transformers_scores(case.model, case), Difference.between(one, found[name])
        spec = read_spec(case.model)
        limits = tolerance(case.dtype, case.head, spec, oracle)
        scores = score_difference(case.dtype, spec, found[name].scores, oracle)
        within = scores <= limits.scores, difference.loss <= limits.loss, difference.grad_norm <= limits.grad_norm
        assert not all(within), f"{name}: {scores}, {difference}, {limits}"
