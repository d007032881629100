"""Controls for `search_demo.py`: a retriever without results, and training without the mask."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from mrl.agents.environment import Done, Observation, Turn
from mrl.demo.facts import FactSearch
from mrl.protocol import DataProto
from mrl.protocol.columns import Jagged


class SilentSearch(FactSearch):
    """Finds nothing, but knows the answers."""

    def step(self, turn: Turn) -> Observation | Done:
        result = super().step(turn)
        return Observation(results=["" for _ in turn.calls]) if isinstance(result, Observation) else result


@contextmanager
def without_mask() -> Iterator[None]:
    """Train on the environment's answers as if the model had written them."""
    from mrl.trainer.generation import Generator

    original_columns = Generator._columns

    def columns(generator: Generator, *arguments: Any) -> DataProto:
        batch = original_columns(generator, *arguments)
        mask, log_probs = batch["response_mask"], batch["rollout_log_probs"]
        batch = batch.with_column("response_mask", Jagged(torch.ones_like(mask.values), mask.lengths))
        return batch.with_column("rollout_log_probs", Jagged(log_probs.values.nan_to_num(0.0), log_probs.lengths))

    with mock.patch.object(Generator, "_columns", columns):
        yield
