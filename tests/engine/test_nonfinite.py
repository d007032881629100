"""A non-finite loss: no rank steps, it is counted, and the third in a row stops the run with names."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from mrl.config.schema import ParallelConfig as Layout
from mrl.engine.engine import MegatronEngine
from mrl.engine.parallel import model_parallel
from mrl.engine.scores import LossInput, LossOutput
from mrl.errors import EngineError
from mrl.verify.spawn import run_distributed
from tests.engine.tiny_training import build, negative_score, step

LIMIT_S = 300.0
LAYOUTS = [Layout(), Layout(pp=2)]


@dataclass
class Poison:
    """A loss that is NaN in the second micro-batch, on request."""

    here: bool
    num_seen: int = 0

    def __call__(self, batch: LossInput) -> LossOutput:
        output = negative_score(batch)
        self.num_seen += 1
        return LossOutput(output.loss * math.nan, output.reports) if self.here and self.num_seen == 2 else output


def state(engine: MegatronEngine) -> list[torch.Tensor]:
    """Return all state that a step may change."""
    assert engine.optimizer is not None, "the engine is trained"
    weights = [parameter.detach() for model in engine.models for parameter in model.parameters()]
    return [tensor.clone() for tensor in [*weights, *engine.optimizer.state_tensors()]]


def poisoned_steps(path: str, layouts: list[Layout]) -> list[dict[str, Any]]:
    return [poisoned_step(path, layout) for layout in layouts]


def poisoned_step(path: str, layout: Layout) -> dict[str, Any]:
    """Run a good step, a bad one, a good one, and three bad ones; one data-parallel rank has the bad loss."""
    with model_parallel(layout, seed=1) as groups:
        engine = build(path, layout, groups)
        optimizer = engine.optimizer
        assert optimizer is not None, "the engine is trained"

        def bad() -> float:
            return step(engine, Poison(here=groups.at.dp == groups.mesh.dp - 1))[1]

        norms = [step(engine)[1]]
        before = state(engine)
        norms.append(bad())
        unchanged = all(torch.equal(a, b) for a, b in zip(before, state(engine), strict=True))
        counted = [(optimizer.num_skipped, optimizer.num_skipped_in_a_row, optimizer.num_steps)]
        norms.append(step(engine)[1])
        moved = not all(torch.equal(a, b) for a, b in zip(before, state(engine), strict=True))
        counted.append((optimizer.num_skipped, optimizer.num_skipped_in_a_row, optimizer.num_steps))
        norms += [bad(), bad()]
        try:
            bad()
            error = ""
        except EngineError as stopped:
            error = stopped.what
        return {"norms": norms, "unchanged": unchanged, "moved": moved, "counted": counted, "error": error}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """Results of the two ranks for each layout."""
    from tests.models.tiny_models import make_tiny  # transformers is not for the ranks, which import this module

    path = make_tiny("qwen3", tmp_path_factory.mktemp("model") / "qwen3")
    by_rank = run_distributed(2, poisoned_steps, str(path), LAYOUTS, timeout_s=LIMIT_S)
    return [list(found) for found in zip(*by_rank, strict=True)]


def test_no_rank_takes_the_step_and_all_go_on(ranks: list[list[dict[str, Any]]]) -> None:
    for found in ranks:
        for rank in found:
            assert [math.isfinite(norm) for norm in rank["norms"]] == [True, False, True, False, False]
            assert rank["unchanged"]
            assert rank["moved"]
            assert rank["counted"] == [(1, 1, 1), (1, 0, 2)]


def test_the_third_in_a_row_stops_the_run_with_the_names_of_tensors(ranks: list[list[dict[str, Any]]]) -> None:
    data_parallel, pipeline = ranks
    for rank in (*data_parallel, *pipeline):
        assert rank["error"].startswith("3 updates in a row had no finite gradient norm (the last: nan); on this rank ")
    assert "embedding.word_embeddings.weight" in data_parallel[1]["error"]
    assert "embedding.word_embeddings.weight" in pipeline[0]["error"]
    assert "decoder.layers.0.self_attention.linear_qkv.weight" in pipeline[1]["error"]
