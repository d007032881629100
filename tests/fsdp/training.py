"""A sharded engine with the weights of a tiny model, for the steps of `tests.engine.tiny_training`."""

from __future__ import annotations

from typing import Any, Literal

from mrl.config.fsdp import FsdpConfig
from mrl.config.schema import MegatronModelConfig, ParallelConfig, ScheduleConfig, TrainedModelConfig
from mrl.fsdp.engine import FsdpEngine, FsdpRequest
from mrl.fsdp.parallel import ShardGroups
from mrl.models.families import read_spec
from mrl.models.hf_reader import HfReader
from mrl.models.table import Head


def build(
    path: str,
    groups: ShardGroups,
    *,
    head: Head = "lm",
    dtype: Literal["float32", "bfloat16"] = "float32",
    trained: bool = True,
    schedule: ScheduleConfig | None = None,
    fsdp: FsdpConfig | None = None,
    **optimizer: float,
) -> FsdpEngine:
    same: dict[str, Any] = {"strategy": "fsdp", "parallel": groups.parallel, "dtype": dtype}
    same |= {"max_tokens_per_device": 64, "fsdp": fsdp or FsdpConfig()}
    settings = MegatronModelConfig(**same)
    if trained:
        values = {"lr": 1e-2, "weight_decay": 0.01, **optimizer}
        settings = TrainedModelConfig(**same, optimizer=values, schedule=schedule or ScheduleConfig())
    engine = FsdpEngine(FsdpRequest(read_spec(path), head, settings), groups)
    engine.load(HfReader(path))
    return engine


def layout(**sizes: int) -> ParallelConfig:
    return ParallelConfig(**sizes)
