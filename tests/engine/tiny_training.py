"""A few steps of a tiny model in any layout, on the same eight rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch

from mrl.config.lora import LoraConfig
from mrl.config.schema import MegatronModelConfig, ParallelConfig, ScheduleConfig, TrainedModelConfig
from mrl.engine.engine import EngineRequest, MegatronEngine, Rows
from mrl.engine.offload import DeviceMemory, PartName
from mrl.engine.packed_rows import TokenRows
from mrl.engine.parallel import ParallelGroups
from mrl.engine.scores import LossFunction, LossInput, LossOutput, ScoreRequest
from mrl.errors import EngineError
from mrl.models.families import read_spec
from mrl.models.hf_reader import HfReader
from mrl.models.table import Head

LENGTHS = np.array([9, 14, 5, 20, 7, 11, 16, 8])
VOCAB = 131


def build(
    path: str,
    layout: ParallelConfig,
    groups: ParallelGroups,
    *,
    head: Head = "lm",
    dtype: Literal["float32", "bfloat16"] = "float32",
    trained: bool = True,
    schedule: ScheduleConfig | None = None,
    lora: LoraConfig | None = None,
) -> MegatronEngine:
    """Build an engine with the weights of a tiny model."""
    settings = MegatronModelConfig(parallel=layout, dtype=dtype, max_tokens_per_device=64)
    if trained:
        settings = TrainedModelConfig(
            parallel=layout,
            dtype=dtype,
            max_tokens_per_device=64,
            optimizer={"lr": 1e-2, "weight_decay": 0.01},
            schedule=schedule or ScheduleConfig(),
            lora=lora,
        )
    engine = MegatronEngine(EngineRequest(read_spec(path), head, settings), groups)
    engine.load(HfReader(path))
    return engine


def share(engine: MegatronEngine) -> tuple[TokenRows, list[Rows]]:
    """Return this data-parallel rank's rows in micro-batches of two (of one if it has only two)."""
    tokens = torch.randint(0, VOCAB, (int(LENGTHS.sum()),), generator=torch.Generator().manual_seed(7))
    rows = TokenRows(tokens, LENGTHS, LENGTHS - 2, {})
    mine = np.arange(engine.groups.at.dp, len(LENGTHS), engine.groups.mesh.dp)
    return rows.take(mine), np.array_split(np.arange(len(mine)), max(2, len(mine) // 2))


def negative_score(batch: LossInput) -> LossOutput:
    """Return the negative sum of all log-probs or values."""
    scores = batch.scores
    scores_T = scores.values_T if scores.log_probs_T is None else scores.log_probs_T
    assert scores_T is not None, "a model gives log-probs or values"
    loss = -scores_T.sum() / 100
    return LossOutput(loss, {"loss": loss.detach()})


def step(engine: MegatronEngine, loss: LossFunction = negative_score) -> tuple[float, float]:
    """Run one update. Return this rank's part of the loss, and the gradient norm."""
    reports, outcome = engine.update(*share(engine), loss, ScoreRequest())
    speaks = engine.groups.mesh.is_output_rank(engine.groups.at.rank)
    return reports["loss"] if speaks else 0.0, outcome.grad_norm


def log_probs(engine: MegatronEngine) -> list[float]:
    """Return results of this rank's rows, or nothing if it is not on the last stage."""
    scores = engine.forward(*share(engine), ScoreRequest())
    return [] if scores is None or scores.log_probs_T is None else scores.log_probs_T.tolist()


def whole_losses(ranks: list[Any]) -> list[float]:
    """Combine the steps of all ranks into losses of the whole batch."""
    return [sum(loss for loss, _ in steps) for steps in zip(*ranks, strict=True)]


@contextmanager
def on_host(memory: DeviceMemory, *names: PartName) -> Iterator[None]:
    """Offload these parts for the duration of the block. Parts that are offloaded already stay so."""
    leaving = [name for name in names if memory.device_bytes.get(name)]
    memory.offload(*leaving)
    yield
    memory.onload(*leaving)


def refusal(action: Callable[[], object]) -> str:
    """Return the engine's error, or an empty text."""
    try:
        action()
    except EngineError as error:
        return error.what
    return ""
