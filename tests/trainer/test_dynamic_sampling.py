"""DAPO's refill: only prompts that teach something, a full batch of them, and an end to trying."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mrl.config.algorithm import DynamicSamplingConfig
from mrl.errors import RewardError
from mrl.protocol import DataProto
from mrl.protocol.columns import from_rows
from mrl.trainer.collector import full_batch
from mrl.trainer.generation import ScoredBatch
from tests.trainer.fakes import Prompts

SAMPLES = 2


def config(most_rounds: int | None) -> Any:
    settings = None if most_rounds is None else DynamicSamplingConfig(most_rounds=most_rounds)
    return SimpleNamespace(
        algorithm=SimpleNamespace(dynamic_sampling=settings), batch=SimpleNamespace(prompts_per_step=3)
    )


def score_as(teaches: set[str]) -> Any:
    """Samples that score differently for the prompts in `teaches`, and alike for all others."""

    def generate(prompts: DataProto) -> ScoredBatch:
        samples = prompts.repeat(SAMPLES)
        uids = samples.non_tensor_batch["uid"]
        scores = [float(uid in teaches and row % SAMPLES) for row, uid in enumerate(uids)]
        columns = {
            "scores": torch.tensor(scores, dtype=torch.float64),
            "responses": from_rows([[1, 2]] * len(samples)),
        }
        made = DataProto.from_dict(columns, row_ids=samples.row_ids)
        return ScoredBatch(samples.union(made), {"reward/score/mean": sum(scores) / len(scores)})

    return generate


def test_rounds_go_on_until_the_batch_is_full_of_prompts_that_teach() -> None:
    prompts = Prompts(3)
    scored = full_batch(config(4), prompts, score_as({"p1", "p3", "p7", "p8"}))  # type: ignore[arg-type]
    assert list(scored.batch.non_tensor_batch["uid"]) == ["p1", "p1", "p3", "p3", "p7", "p7"]
    assert prompts.num_drawn == 9
    assert scored.metrics["sampling/rounds"] == 3
    assert scored.metrics["sampling/uniform_prompts"] == 5
    assert scored.batch.row_ids.tolist() == [2, 3, 6, 7, 14, 15]
    assert scored.batch["scores"].tolist() == [0.0, 1.0] * 3, "each row keeps its own score"
    assert scored.metrics["reward/score/mean"] == pytest.approx((1 / 6 + 1 / 6 + 2 / 6) / 3), "the mean of the rounds"


@pytest.mark.parametrize("most_rounds", [1, 2, 3])
def test_as_many_rounds_as_are_allowed_may_fill_the_batch(most_rounds: int) -> None:
    """The third prompt that teaches comes in the last round."""
    teaches = {"p0", "p1", f"p{3 * most_rounds - 1}"}
    prompts = Prompts(3)
    scored = full_batch(config(most_rounds), prompts, score_as(teaches))  # type: ignore[arg-type]
    assert set(scored.batch.non_tensor_batch["uid"]) == teaches
    assert scored.metrics["sampling/rounds"] == most_rounds
    assert prompts.num_drawn == 3 * most_rounds, "and no more are drawn than are needed"


def test_a_batch_that_never_fills_names_its_figures() -> None:
    prompts = Prompts(3)
    with pytest.raises(RewardError, match=r"0 of 3 .* 3 rounds of 3 prompts each; 9 prompts have equal scores"):
        full_batch(config(3), prompts, score_as(set()))  # type: ignore[arg-type]
    assert prompts.num_drawn == 9


def test_without_it_the_figures_are_those_of_the_round() -> None:
    scored = full_batch(config(None), Prompts(3), score_as({"p1"}))  # type: ignore[arg-type]
    assert len(scored.batch) == 3 * SAMPLES
    assert scored.metrics == {"reward/score/mean": pytest.approx(1 / 6)}
