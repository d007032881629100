"""Adapters in every kind of layout against peft, and their checkpoints."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrl.config.lora import ALL_LINEAR, ATTENTION_TARGETS, LoraConfig
from mrl.config.schema import ParallelConfig as Layout
from mrl.models.regions import is_exact_cover, slices
from mrl.verify.spawn import run_distributed
from tests.engine.adapter_training import (
    Case,
    Floats,
    Found,
    Oracle,
    measure,
    with_formula,
    with_peft,
    with_peft_experts,
)
from tests.engine.grouped_linear import measure_together
from tests.models.tiny_models import make_tiny

LIMIT_S = 300.0
TOLERANCE = 2e-5
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
ALL = {"rank": 4, "alpha": 8.0, "targets": [ALL_LINEAR]}
SOME = {"rank": 3, "alpha": 5.0, "targets": ["q_proj", "v_proj", "up_proj", "down_proj"], "rslora": True}
ATTENTION = {"rank": 4, "alpha": 8.0, "targets": [*ATTENTION_TARGETS]}
LAYOUTS: dict[int, list[tuple[str, dict[str, Any], Layout, dict[str, Any]]]] = {
    1: [("qwen3", ALL, Layout(), {}), ("llama", SOME, Layout(), RECOMPUTED)],
    2: [
        ("qwen3", ALL, Layout(tp=2), {}),
        ("qwen3", ALL, Layout(tp=2, sequence_parallel=True), {}),
        ("qwen3", ALL, Layout(pp=2), RECOMPUTED),
        ("qwen3", ALL, Layout(pp=2, vpp=2), {}),
        ("qwen3", ALL, Layout(cp=2), {}),
        ("qwen3", ALL, Layout(), {}),
        ("llama", SOME, Layout(tp=2, sequence_parallel=True), RECOMPUTED),
        ("llama", SOME, Layout(tp=2), {}),
        ("mixtral", ALL, Layout(ep=2), {}),
        ("mixtral", ALL, Layout(), RECOMPUTED),
        ("mixtral", ALL, Layout(tp=2, etp=2, sequence_parallel=True), {}),
        ("mixtral", ALL, Layout(etp=2), {}),
        ("deepseek_v3", ALL, Layout(tp=2, ep=2, sequence_parallel=True), {}),
        ("deepseek_v3", ALL, Layout(pp=2), {}),
        ("gpt_oss", ALL, Layout(tp=2, ep=2, sequence_parallel=True), {}),
        ("qwen3_5_text", ALL, Layout(tp=2, sequence_parallel=True), {}),
        ("qwen3_5_text", ALL, Layout(pp=2), RECOMPUTED),
        ("qwen3_next", ALL, Layout(tp=2, ep=2, sequence_parallel=True), {}),
    ],
    4: [
        ("qwen3", ALL, Layout(tp=2, pp=2, sequence_parallel=True), {}),
        ("llama", SOME, Layout(tp=2, cp=2, sequence_parallel=True), {}),
        ("qwen3_moe", ATTENTION, Layout(tp=2, pp=2, ep=2, sequence_parallel=True), {}),
        ("qwen3_moe", ALL, Layout(tp=2, ep=2, sequence_parallel=True), RECOMPUTED),
        ("qwen3_moe", ALL, Layout(tp=2, ep=2, etp=2, sequence_parallel=True), RECOMPUTED),
        ("qwen3_moe", ALL, Layout(tp=4, etp=2, sequence_parallel=True), {}),
        ("qwen3_moe", ALL, Layout(pp=2, etp=2), {}),
        ("glm4_moe_lite", ALL, Layout(tp=2, ep=4, sequence_parallel=True), {}),
        ("qwen3_5_moe_text", ALL, Layout(tp=2, pp=2, ep=2, sequence_parallel=True), {}),
    ],
}


ORACLES = {
    "mixtral": with_peft_experts,
    "qwen3_moe": with_formula,
    "deepseek_v3": with_formula,
    "glm4_moe_lite": with_formula,
    "qwen3_next": with_formula,
    "qwen3_5_moe_text": with_formula,
}
"""Oracles of adapters on experts. peft cannot have them next to those of a dense layer or a shared expert."""


GROUPED = [
    ("mixtral", ALL, Layout(tp=2, etp=2, sequence_parallel=True), with_peft_experts, RECOMPUTED),
    ("qwen3_moe", SOME, Layout(ep=2), with_formula, {}),
    ("deepseek_v3", ALL, Layout(tp=2, ep=2, sequence_parallel=True), with_formula, {}),
]


def largest(one: Floats, other: Floats) -> float:
    return float(np.abs(one - other).max(initial=0.0))


def largest_difference(ranks: list[Found], oracle: Oracle) -> dict[str, float]:
    """Return the distance of all ranks' results from peft's. Raise an error if a gradient is missing or unexpected."""
    rows: dict[str, dict[int, Floats]] = {"on": {}, "off": {}}
    covered: dict[str, list[Any]] = {name: [] for name in oracle.gradients}
    gradient = 0.0
    for rank in ranks:
        rows["on"] |= rank.on
        rows["off"] |= rank.off
        for name, box, part in rank.gradients:
            gradient = max(gradient, largest(part, oracle.gradients[name][slices(box)]))
            covered[name].append(box)
    for name, boxes in covered.items():
        assert is_exact_cover(oracle.gradients[name].shape, list(dict.fromkeys(boxes))), name
    norm = math.sqrt(sum(float(np.square(x).sum()) for x in oracle.gradients.values()))
    expected = {"on": oracle.on, "off": oracle.off}
    return {
        "gradients": gradient,
        "loss": abs(sum(rank.loss for rank in ranks) - oracle.loss) / abs(oracle.loss),
        "norm": max(abs(rank.grad_norm - norm) for rank in ranks) / norm,
        **{name: max(largest(rows[name][number], x) for number, x in enumerate(expected[name])) for name in rows},
    }


def test_adapters_of_experts_that_are_multiplied_together_equal_peft(tmp_path: Path) -> None:
    cases, oracles = [], []
    for family, lora, layout, oracle, megatron in GROUPED:
        model, adapters = str(make_tiny(family, tmp_path / family)), tmp_path / f"{family}-adapters"
        oracles.append(oracle(model, adapters, LoraConfig(**lora)))
        cases.append(Case(model, str(adapters), layout, lora, megatron))
    by_rank = run_distributed(2, measure_together, cases, timeout_s=LIMIT_S)
    for case, oracle, ranks in zip(cases, oracles, zip(*by_rank, strict=True), strict=True):
        differences = largest_difference(list(ranks), oracle)
        assert max(differences.values()) < TOLERANCE, (case, differences)


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow), 4])
def test_adapters_equal_peft(world_size: int, tmp_path: Path) -> None:
    cases, oracles = [], []
    kept: dict[Path, Oracle] = {}
    for family, lora, layout, megatron in LAYOUTS[world_size]:
        model, adapters = tmp_path / family, tmp_path / f"{family}-{len(lora['targets'])}"
        if adapters not in kept:
            oracle = ORACLES.get(family, with_peft) if lora is ALL else with_peft
            made = model if model.exists() else make_tiny(family, model)
            kept[adapters] = oracle(str(made), adapters, LoraConfig(**lora))
        oracles.append(kept[adapters])
        cases.append(Case(str(model), str(adapters), layout, lora, megatron))
    if world_size == 2:
        overlapped = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 5000}
        cases += [replace(cases[1], dtype="bfloat16"), replace(cases[5], ddp=overlapped)]
        oracles += [oracles[1], oracles[5]]
    by_rank = run_distributed(world_size, measure, cases, timeout_s=LIMIT_S)
    for case, oracle, ranks in zip(cases, oracles, zip(*by_rank, strict=True), strict=True):
        differences = largest_difference(list(ranks), oracle)
        if case.dtype == "bfloat16":
            assert differences["loss"] < 0.002, differences
            assert differences["norm"] < 0.004, differences
            continue
        assert max(differences.values()) < TOLERANCE, (case, differences)
        num_adapted = sum(x.size for x in oracle.gradients.values())
        assert all(rank.num_buffered < 1.1 * num_adapted + 10_000 for rank in ranks), (
            "the frozen model has no gradients"
        )
        moved = max(largest(on, off) for on, off in zip(oracle.on, oracle.off, strict=True))
        assert moved > 0.1, "the adapters change nothing: the comparison would prove nothing"
