"""A sharded model learns exactly as Megatron's on one rank: log-probs, losses, gradient norms, updated weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mrl.config.schema import ParallelConfig as Layout
from mrl.models.table import Head
from mrl.verify.parity import Difference, ParityCase, ParityResult, measure, merge_ranks, transformers_scores
from mrl.verify.spawn import run_distributed
from tests.models.tiny_models import make_tiny

LIMIT_S = 300.0
CASES: list[tuple[str, Head, list[Layout]]] = [
    ("qwen3", "lm", [Layout(), Layout(cp=2)]),
    ("llama_tied", "lm", [Layout()]),
    ("mistral", "lm", [Layout(cp=2)]),  # a window over two context ranks
    ("qwen3_moe", "lm", [Layout()]),  # experts that transformers stacks
    ("glm4_moe", "lm", [Layout()]),  # a buffer in the files
    ("llama", "score", [Layout(), Layout(cp=2)]),
]
MORE: list[tuple[str, Head, list[Layout]]] = [
    ("qwen2", "lm", [Layout(), Layout(cp=2)]),
    ("mixtral", "lm", [Layout(), Layout(cp=2)]),
    ("deepseek_v3", "lm", [Layout(), Layout(cp=2)]),  # values that are narrower than keys
    ("glm4_moe_lite", "lm", [Layout()]),
]


def results(size: int, cases: list[ParityCase]) -> list[ParityResult]:
    by_rank = run_distributed(size, measure, cases, timeout_s=LIMIT_S)
    return [merge_ranks(list(ranks)) for ranks in zip(*by_rank, strict=True)]


def compare(
    size: int, cases: list[tuple[str, Head, list[Layout]]], directory: Path, shard_size: int | None = None
) -> None:
    """Compare every layout with one rank of Megatron. The batch is cut into other micro-batches."""
    alone, sharded = [], []
    for family, head, layouts in cases:
        model = str(make_tiny(family, directory / f"{family}-{head}", 0, head))
        one = ParityCase(model, head, Layout(), 1000)
        alone.append(one)
        own = replace(one, strategy="fsdp", max_tokens=64, shard_size=shard_size)
        sharded.append([replace(own, parallel=layout) for layout in layouts])
    ones = results(1, alone)
    for one, case in zip(ones, alone, strict=True):
        assert np.abs(one.scores - transformers_scores(case.model, case)).max() < 2e-5
    others = iter(results(size, [case for group in sharded for case in group]))
    for one, group in zip(ones, sharded, strict=True):
        for case in group:
            difference = Difference.between(one, next(others))
            assert difference.scores < 2e-5, (case, difference)
            assert max(difference.loss, difference.grad_norm, difference.parameters) < 2e-5, (case, difference)


def test_two_ranks_equal_one_rank_of_megatron(tmp_path: Path) -> None:
    compare(2, CASES, tmp_path)


@pytest.mark.slow
def test_two_ranks_equal_one_rank_of_megatron_in_more_families(tmp_path: Path) -> None:
    compare(2, MORE, tmp_path)


@pytest.mark.slow
def test_copies_on_two_nodes_and_ranks_without_rows_equal_one_rank(tmp_path: Path) -> None:
    """Four ranks in two copies. Some tensors have fewer rows than ranks, and rows that do not divide."""
    cases: list[tuple[str, Head, list[Layout]]] = [
        ("qwen3", "lm", [Layout(), Layout(cp=2)]),
        ("llama", "score", [Layout()]),
    ]
    compare(4, cases, tmp_path, shard_size=2)
    compare(3, [("qwen3_moe", "lm", [Layout()]), ("llama", "score", [Layout()])], tmp_path / "three")
