"""Memory of a real engine by its own accounting, run on ranks, compared with the prediction for the same rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mrl.config.lora import LoraConfig
from mrl.config.schema import ParallelConfig
from mrl.engine.parallel import model_parallel
from mrl.models.table import Head
from mrl.plan.weights import WeightBytes, buffers, stage_weights
from tests.engine.tiny_training import build, step


@dataclass(frozen=True)
class Case:
    """A tiny model in a layout over two ranks."""

    model: str
    layout: ParallelConfig
    head: Head = "lm"
    dtype: str = "bfloat16"
    lora: LoraConfig | None = None


@dataclass(frozen=True)
class Accounts:
    """One rank's bytes after a step, and what was predicted for it."""

    held: dict[str, int]
    predicted: WeightBytes
    owned_bytes: float
    """Optimizer state of the elements that this rank owns, on average over the ranks that share it."""
    is_exact: bool
    """Whether the elements that this rank owns contain no padding: none exists, or no other rank shares a buffer with
    it."""


def accounts(cases: list[Case]) -> list[Accounts]:
    """One for each case, of this rank."""
    return [_account(case) for case in cases]


def _account(case: Case) -> Accounts:
    with model_parallel(case.layout, seed=1) as groups:
        dtype: Any = case.dtype
        engine = build(case.model, case.layout, groups, head=case.head, dtype=dtype, lora=case.lora)
        step(engine)
        request, mesh, stage = engine.request, groups.mesh, groups.at.pp
        found = buffers(request.spec, request.settings, mesh, case.head, stage)
        return Accounts(
            held=dict(engine.memory.device_bytes),
            predicted=stage_weights(request.spec, request.settings, mesh, case.head, stage),
            owned_bytes=sum(
                buffer.num_elements / buffer.num_owners * (12 if dtype == "bfloat16" and not buffer.is_float32 else 8)
                for buffer in found
            ),
            is_exact=all(buffer.num_owners == 1 or buffer.num_padded == buffer.num_elements for buffer in found),
        )
