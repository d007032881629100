"""Memory of a tiny model that torch shards, measured in the same way in a real run and in a rehearsal; imported by the
ranks."""

from __future__ import annotations

import gc
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

from mrl.config.lora import LoraConfig
from mrl.config.schema import FsdpConfig, ParallelConfig, TrainedModelConfig
from mrl.engine.scores import ScoreRequest
from mrl.fsdp.engine import FsdpEngine, FsdpRequest
from mrl.fsdp.parallel import ShardGroups, shard_groups
from mrl.models.families import read_spec
from mrl.models.hf_reader import HfReader
from mrl.rehearse.fake_world import fake_world
from mrl.rehearse.model_files import TableReader
from mrl.rehearse.sharded import sharded_answers
from mrl.rehearse.stand_ins import replaced
from mrl.rehearse.timeline import MemoryTimeline
from tests.engine import tiny_training
from tests.rehearse.measured import Observing


@dataclass(frozen=True)
class Case:
    """A tiny model over two ranks."""

    model: str
    dtype: Literal["bfloat16", "float32"] = "float32"
    layout: ParallelConfig = field(default_factory=ParallelConfig)
    recompute: bool = False
    lora: LoraConfig | None = None


Measured = dict[str, int]
"""The peak of each phase of a rank."""


def really(cases: list[Case]) -> list[Measured]:
    """Return the phases of every case on this rank of a real world."""
    found = []
    for case in cases:
        timeline = MemoryTimeline()
        observing = Observing(timeline, "distributed_c10d.py")  # other files make the buffers of `fully_shard`
        with shard_groups(case.layout, None, seed=1) as groups, timeline.follows_resizing(), observing:
            _run(case, groups, timeline, HfReader)
        found.append({phase.name: phase.peak for phase in timeline.phases})
    return found


def rehearsed(cases: list[Case], rank: int) -> list[Measured]:
    """Rehearse every case as this rank of two, with the CPU's own kernels."""
    found = []
    for case in cases:
        timeline = MemoryTimeline()
        with ExitStack() as stack:
            stack.enter_context(fake_world(rank, 2, timeline.observe))
            stack.enter_context(timeline.follows_resizing())
            stack.enter_context(replaced(sharded_answers()))
            groups = stack.enter_context(shard_groups(case.layout, None, seed=1))
            _run(case, groups, timeline, TableReader)
        found.append({phase.name: phase.peak for phase in timeline.phases})
    return found


def _run(case: Case, groups: ShardGroups, timeline: MemoryTimeline, reader: Any) -> None:
    """Load the model, score, and make two updates; the first makes Adam's moments."""
    gc.disable()  # it would free cycles at other moments in a run and alone
    settings = TrainedModelConfig(
        strategy="fsdp",
        parallel=case.layout,
        dtype=case.dtype,
        max_tokens_per_device=64,
        fsdp=FsdpConfig(recompute=case.recompute),
        lora=case.lora,
        optimizer={"lr": 1e-2, "weight_decay": 0.01},
    )
    engine = FsdpEngine(FsdpRequest(read_spec(case.model), "lm", settings), groups)
    with timeline.phase("build"):
        engine.load(reader(case.model))
    rows, batches = tiny_training.share(engine)
    with timeline.phase("score"):
        engine.forward(rows, batches, ScoreRequest())
    for phase in ("first update", "second update"):
        gc.collect()
        with timeline.phase(phase):
            engine.update(rows, batches, tiny_training.negative_score, ScoreRequest())
    with timeline.phase("offload"):
        engine.memory.offload("parameters", "gradients", "optimizer")
