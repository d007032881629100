"""The learning rate of every update, computed by the real Megatron."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.config.schema import ParallelConfig, ScheduleConfig
from mrl.engine.parallel import model_parallel
from mrl.verify.spawn import run_distributed
from tests.engine.tiny_training import build, step

LIMIT_S = 300.0
PEAK = 1e-2
SCHEDULES = [
    ScheduleConfig(),
    ScheduleConfig(warmup_steps=2),
    ScheduleConfig(warmup_steps=2, decay="linear", decay_steps=6, min_lr_ratio=0.1),
    ScheduleConfig(decay="cosine", decay_steps=4),
]
EXPECTED = [
    [1, 1, 1, 1, 1, 1, 1, 1],
    [0, 0.5, 1, 1, 1, 1, 1, 1],
    [0, 0.5, 1, 0.775, 0.55, 0.325, 0.1, 0.1],
    [1, 0.8535534, 0.5, 0.1464466, 0, 0, 0, 0],
]


def rates(path: str) -> list[list[float]]:
    found = []
    with model_parallel(ParallelConfig(), seed=1) as groups:
        for schedule in SCHEDULES:
            engine = build(path, ParallelConfig(), groups, schedule=schedule)
            assert engine.optimizer is not None, "the engine is trained"
            found.append([])
            for _ in EXPECTED[0]:
                found[-1].append(engine.optimizer.learning_rate / PEAK)
                step(engine)
    return found


def test_the_learning_rate_of_each_update(tmp_path: Path) -> None:
    from tests.models.tiny_models import make_tiny  # transformers is not for the ranks, which import this module

    (found,) = run_distributed(1, rates, str(make_tiny("llama", tmp_path / "llama")), timeout_s=LIMIT_S)
    for schedule, seen, expected in zip(SCHEDULES, found, EXPECTED, strict=True):
        assert seen == pytest.approx(expected, abs=1e-6), schedule
