"""Memory of a tiny engine, measured in the same way in a real run and in a rehearsal; imported by the ranks."""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from mrl.config.schema import ParallelConfig
from mrl.engine import weights
from mrl.engine.engine import MegatronEngine
from mrl.engine.parallel import model_parallel
from mrl.engine.scores import ScoreRequest
from mrl.rehearse.fake_world import fake_world
from mrl.rehearse.model_files import TableReader, load_shard
from mrl.rehearse.stand_ins import Routing, StageMessages, answers, replaced
from mrl.rehearse.timeline import MemoryTimeline
from tests.engine import tiny_training


class Observing(TorchDispatchMode):
    """Shows every operation of a real run to a timeline, except those of a file of torch's communication: gloo copies
    what it reduces, and NCCL does not."""

    def __init__(self, timeline: MemoryTimeline, file: str = "torch/distributed/") -> None:
        super().__init__()
        self._timeline, self._file = timeline, file

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # its wrapper would hide the caller

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its own dispatch calls the operation on the rank's shard
        result = func(*args, **(kwargs or {}))
        if self._file not in sys._getframe(1).f_code.co_filename:
            self._timeline.observe(func, args, result)
        return result


Case = tuple[str, ParallelConfig]
"""Directory of a tiny model, and its layout over two ranks."""
Measured = tuple[dict[str, int], float]
"""The peak of each phase of a rank, and its loss."""


def really(cases: list[Case]) -> list[Measured]:
    """Run every case on this rank of a real world."""
    found = []
    for model, layout in cases:
        timeline = MemoryTimeline()
        with model_parallel(layout, seed=1) as groups, timeline.follows_resizing(), Observing(timeline):
            with timeline.phase("build"):
                engine = tiny_training.build(model, layout, groups)
            loss = _step(engine, timeline)
        found.append(({phase.name: phase.peak for phase in timeline.phases}, loss))
    return found


def unobserved(cases: list[Case]) -> list[float]:
    """Return the losses of the same steps without a timeline."""
    losses = []
    for model, layout in cases:
        with model_parallel(layout, seed=1) as groups:
            losses.append(_step(tiny_training.build(model, layout, groups), MemoryTimeline()))
    return losses


def rehearsed(cases: list[Case], rank: int) -> list[dict[str, int]]:
    """Rehearse every case as this rank of two, with the CPU's own kernels."""
    return [_rehearsed(model, layout, rank) for model, layout in cases]


def _rehearsed(model: str, layout: ParallelConfig, rank: int) -> dict[str, int]:
    timeline = MemoryTimeline()
    messages = StageMessages(layout.tp if layout.sequence_parallel else 1)
    by_hand = [
        *answers(messages, Routing(range(0), 1.0)),
        (tiny_training, "HfReader", TableReader),
        (weights, "load_shard", load_shard),
    ]
    with ExitStack() as stack:
        stack.enter_context(fake_world(rank, 2, timeline.observe))
        stack.enter_context(timeline.follows_resizing())
        stack.enter_context(replaced(by_hand))
        groups = stack.enter_context(model_parallel(layout, seed=1))
        with timeline.phase("build"):
            engine = tiny_training.build(model, layout, groups)
        messages.belongs_to(engine)
        _step(engine, timeline)
    return {phase.name: phase.peak for phase in timeline.phases}


def _step(engine: MegatronEngine, timeline: MemoryTimeline) -> float:
    """Score, and make two updates; the first makes Adam's moments. Return the loss."""
    rows, batches = tiny_training.share(engine)
    with timeline.phase("score"):
        engine.forward(rows, batches, ScoreRequest())
    for phase in ("first update", "second update"):
        gc.collect()  # cycles would be freed at other moments in either process
        with timeline.phase(phase):
            reports, _ = engine.update(rows, batches, tiny_training.negative_score, ScoreRequest())
    with timeline.phase("offload"):
        engine.memory.offload("parameters", "gradients", "optimizer")
    return float(np.nansum(list(reports.values())))
