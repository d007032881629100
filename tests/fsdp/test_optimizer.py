"""The optimizer's own rules: Megatron's schedule, clipping over all ranks, decay of matrices only, skipped steps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from mrl.config.fsdp import FsdpConfig
from mrl.config.schema import ParallelConfig, ScheduleConfig
from mrl.engine.scores import LossInput, LossOutput, ScoreRequest
from mrl.errors import EngineError
from mrl.fsdp.optimizer import rate_at
from mrl.fsdp.parallel import shard_groups
from mrl.verify.spawn import run_distributed
from tests.engine.tiny_training import negative_score, share, step
from tests.fsdp.training import build
from tests.models.tiny_models import make_tiny

SCHEDULES = [
    ScheduleConfig(),
    ScheduleConfig(warmup_steps=3),
    ScheduleConfig(warmup_steps=2, decay="linear", decay_steps=6, min_lr_ratio=0.1),
    ScheduleConfig(decay="cosine", decay_steps=5),
]


@pytest.mark.needs("megatron")
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_the_schedule_is_that_of_megatron(schedule: ScheduleConfig) -> None:
    import mrl.engine.with_megatron  # noqa: F401

    # isort: split
    from megatron.core.optimizer import OptimizerConfig

    from mrl.engine.optimizer import _schedule

    class Optimizer:
        def __init__(self) -> None:
            self.param_groups: list[dict[str, Any]] = [{"lr": 0.0}]

    optimizer = Optimizer()
    megatron = _schedule(optimizer, OptimizerConfig(lr=3e-4, weight_decay=0.0), schedule)
    for number in range(10):
        assert rate_at(number, 3e-4, schedule) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12), number
        megatron.step(1)


def not_a_number(batch: LossInput) -> LossOutput:
    output = negative_score(batch)
    return LossOutput(output.loss * math.nan, output.reports)


def behavior(path: str) -> dict[str, Any]:
    with shard_groups(ParallelConfig(), None, seed=1) as groups:
        engine = build(path, groups, clip_grad=0.5, weight_decay=0.5, lr=0.0)
        found: dict[str, Any] = {"norm": step(engine)[1]}
        assert engine.optimizer is not None
        found["moment"] = sum(float(state["exp_avg"].square().sum()) for state in engine.optimizer._adam.state.values())
        again = build(path, groups, fsdp=FsdpConfig(recompute=True))
        found["recomputed"] = step(again)[1]
        narrow = build(path, groups, dtype="bfloat16")
        found["narrow"] = step(narrow)[1]
        found["kept_wide"] = {str(tensor.dtype) for _, tensor in narrow.held_tensors()}
        frozen = build(path, groups, dtype="bfloat16", trained=False)
        found["frozen"] = {str(tensor.dtype) for _, tensor in frozen.held_tensors()}
        engine = build(path, groups, clip_grad=0.0, weight_decay=0.5, lr=1e-9, adam_eps=1.0)
        before = {shard.name: tensor.clone() for shard, tensor in engine.held_tensors()}
        assert engine.optimizer is not None
        for group in engine.optimizer._adam.param_groups:  # so strong that nothing else shows
            group["weight_decay"] *= 1e8
        step(engine)
        found["decayed"] = {
            shard.name for shard, tensor in engine.held_tensors() if not torch.allclose(tensor, before[shard.name])
        }
        found["matrices"] = {shard.name for shard, _ in engine.held_tensors() if len(shard.shape) > 1}
        engine = build(path, groups)
        weights = [tensor.clone() for _, tensor in engine.held_tensors()]
        outcomes = [engine.update(*share(engine), not_a_number, ScoreRequest())[1].applied for _ in range(2)]
        found["kept"] = all(torch.equal(a, b) for a, (_, b) in zip(weights, engine.held_tensors(), strict=True))
        found["skipped"] = (outcomes, engine.optimizer.num_skipped if engine.optimizer else 0)
        try:
            engine.update(*share(engine), not_a_number, ScoreRequest())
        except EngineError as error:
            found["refusal"] = error.what
        return found


def test_clipping_decay_and_refusal(tmp_path: Path) -> None:
    path = str(make_tiny("qwen2", tmp_path / "qwen2"))
    (alone,) = run_distributed(1, behavior, path, timeout_s=300)
    ranks = run_distributed(2, behavior, path, timeout_s=300)
    moment = sum(found["moment"] for found in ranks)
    assert math.sqrt(moment) == pytest.approx(0.1 * 0.5, rel=1e-3), "0.1 of a gradient of norm 0.5"
    for found in ranks:
        assert found["norm"] == pytest.approx(alone["norm"], rel=1e-5)
        assert found["recomputed"] == pytest.approx(found["norm"], rel=1e-6)
        assert found["narrow"] == pytest.approx(found["norm"], rel=0.02)
        assert found["narrow"] != found["norm"]
        assert found["kept_wide"] == {"torch.float32"}
        assert found["frozen"] == {"torch.bfloat16"}
        assert found["decayed"] == found["matrices"]
        assert found["kept"]
        assert found["skipped"] == ([False, False], 2)
        assert "3 updates in a row had no finite gradient norm" in found["refusal"]
