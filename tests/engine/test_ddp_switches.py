"""Megatron's switches of data parallelism: each computes what a plain run computes, whatever the steps look like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mrl.config.schema import ParallelConfig, TrainedModelConfig
from mrl.engine.engine import EngineRequest, MegatronEngine
from mrl.engine.local_world import run_on_ranks
from mrl.engine.parallel import Groups, model_parallel
from mrl.engine.scores import ScoreRequest
from mrl.models.families import read_spec
from mrl.models.hf_reader import HfReader
from tests.engine.tiny_training import negative_score, share
from tests.models.tiny_models import make_tiny

LIMIT_S = 300.0
NUM_MICRO_BATCHES = (2, 4, 2, 3)
"""Of each step: what is packed differs from step to step."""
SWITCHES: dict[str, dict[str, Any]] = {
    "reduce while computing": {"overlap_grad_reduce": True},
    "gather while computing": {"overlap_grad_reduce": True, "overlap_param_gather": True},
    "small buckets": {"overlap_grad_reduce": True, "bucket_size": 1000},
    "reduce in one": {"overlap_grad_reduce": False, "bucket_size": 1000},
}
Steps = list[tuple[float, float]]


def steps(path: str, layout: ParallelConfig, groups: Groups, ddp: dict[str, Any]) -> Steps:
    """Gradient norm of each step, and what all parameters of this rank add up to right after it."""
    settings = TrainedModelConfig(
        parallel=layout, dtype="float32", max_tokens_per_device=64, ddp=ddp, optimizer={"lr": 1e-2}
    )
    engine = MegatronEngine(EngineRequest(read_spec(path), "lm", settings), groups)
    engine.load(HfReader(path))
    found = []
    for number in NUM_MICRO_BATCHES:
        rows, _ = share(engine)
        micro_batches = np.array_split(np.arange(len(rows.lengths)), number)
        _, outcome = engine.update(rows, micro_batches, negative_score, ScoreRequest())
        # Nothing runs in between: what is sent to the engines is what stands here now.
        total = sum(
            float(parameter.detach().abs().double().sum())
            for model in engine.models
            for parameter in model.parameters()
        )
        found.append((outcome.grad_norm, total))
    return found


def measure(path: str, layout: ParallelConfig) -> dict[str, Steps]:
    """With each of the switches, and without."""
    torch.manual_seed(0)
    with model_parallel(layout, seed=1) as groups:
        return {name: steps(path, layout, groups, ddp) for name, ddp in {"plain": {}, **SWITCHES}.items()}


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, ParallelConfig()),
        pytest.param(4, ParallelConfig(pp=2), marks=pytest.mark.slow),
        pytest.param(4, ParallelConfig(tp=2, sequence_parallel=True), marks=pytest.mark.slow),
    ],
)
def test_a_switch_changes_no_number(ranks: int, layout: ParallelConfig, tmp_path: Path) -> None:
    path = str(make_tiny("llama", tmp_path / "llama"))
    for found in run_on_ranks(ranks, measure, path, layout, timeout_s=LIMIT_S):
        for name in SWITCHES:
            for number, (seen, expected) in enumerate(zip(found[name], found["plain"], strict=True), 1):
                assert seen == pytest.approx(expected, rel=1e-6), f"{name}: step {number}"
