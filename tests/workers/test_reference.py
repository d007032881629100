"""Reference log-probs of a policy that trains on pairs: from its initial weights, or computed in advance."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mrl.config.sft import DpoLossConfig
from mrl.controller.worker import registered_methods
from mrl.engine.scores import ScoreRequest, Scores
from mrl.errors import EngineError
from mrl.protocol import DataProto
from mrl.protocol.columns import from_rows
from mrl.workers.supervised import DpoWorker
from tests.workers.stubs import SETUP, OfShards, Shards, StubEngine, make_place

LENGTHS, SIZES = (2, 3, 1, 2), [[2, 2]]
MINE = torch.tensor([-1.0, -2.0, -0.5, -0.5, -1.5, -3.0, -0.25, -0.75])
THEIRS = torch.tensor([-1.5, -2.0, -0.5, -1.5, -1.0, -1.0, -0.25, -0.25])
MARGINS = [0.5 - (0.0 + 1.0 - 0.5), -2.0 - (0.0 - 0.5)]
"""Of the two pairs, before beta."""


class OneShard(OfShards, DpoWorker):
    """A DPO worker without other shards."""


def worker_of(scores: Scores | None, num_steps: int = 0, loss: str = "sigmoid") -> OneShard:
    worker = OneShard(make_place(), SETUP, DpoLossConfig(loss=loss, beta=0.5))
    worker.shards, worker.shard = Shards(1), 0
    worker.engine = StubEngine(scores)  # type: ignore[assignment]
    worker.engine.optimizer = SimpleNamespace(num_steps=num_steps)  # type: ignore[assignment]
    return worker


def calls_of(worker: DpoWorker) -> Any:
    return worker.engine.calls  # type: ignore[attr-defined]


def batch_of(**columns: Any) -> DataProto:
    rows = {"prompts": from_rows([[9, 8]] * 4), "responses": from_rows([[number] * number for number in LENGTHS])}
    ranked = {"rank": torch.tensor([0, 1, 0, 1]), "label": torch.zeros(4)}
    return DataProto.from_dict({**rows, **ranked, **columns}, row_ids=[3, 1, 7, 5])


def kept() -> Any:
    return from_rows(list(torch.split(THEIRS, LENGTHS)))


def test_what_was_computed_before_is_what_an_update_compares_with() -> None:
    worker = worker_of(Scores(log_probs_T=MINE.clone().requires_grad_()), num_steps=5)
    report = worker.update_dpo(batch_of(ref_log_probs=kept()), SIZES)
    (call,) = calls_of(worker)
    assert call.weights == "own"
    assert report.parts["reward/margin"] == pytest.approx(0.5 * sum(MARGINS) / 2)


def test_without_it_the_weights_that_are_kept_are_asked() -> None:
    worker = worker_of(Scores(log_probs_T=MINE.clone().requires_grad_()), num_steps=5)
    worker.reference = reference = object()  # type: ignore[assignment]
    report = worker.update_dpo(batch_of(), SIZES)
    assert [call.weights for call in calls_of(worker)] == [reference, "own"]
    assert [call.request for call in calls_of(worker)] == [ScoreRequest()] * 2, "of neither at another temperature"
    assert report.parts["reward/margin"] == 0, "the stub says the same of both"


@pytest.mark.parametrize("loss", ["sigmoid", "simpo"])
def test_validation_adds_up_what_was_computed_before(loss: str) -> None:
    worker = worker_of(Scores(log_probs_T=MINE), num_steps=5, loss=loss)
    found = worker.score_dpo(batch_of(ref_log_probs=kept()), SIZES)
    assert found is not None, "one stage is the last"
    assert [(call.weights, call.request) for call in calls_of(worker)] == [("own", ScoreRequest())]
    assert found["sum_log_probs"].tolist() == [-3.0, -2.5, -3.0, -1.0]
    assert found["sum_ref_log_probs"].tolist() == ([-3.5, -3.0, -1.0, -0.5] if loss == "sigmoid" else [0.0] * 4)


def test_the_policy_before_its_first_update_is_the_reference() -> None:
    worker = worker_of(Scores(log_probs_T=MINE.double()))
    found = worker.compute_ref_log_prob(batch_of(), SIZES)
    assert found is not None, "one stage is the last"
    assert [(call.weights, call.request, call.micro_batches) for call in calls_of(worker)] == [
        ("own", ScoreRequest(), [[0, 1], [2, 3]])
    ]
    assert torch.equal(found.values("ref_log_probs"), MINE)
    assert found.lengths("ref_log_probs").tolist() == list(LENGTHS)
    assert found.row_ids.tolist() == [3, 1, 7, 5]
    assert worker_of(None).compute_ref_log_prob(batch_of(), SIZES) is None


def test_a_policy_that_has_learned_is_no_reference() -> None:
    worker = worker_of(Scores(log_probs_T=MINE), num_steps=3)
    with pytest.raises(EngineError, match=r"has made 3 updates: it is no longer the reference\n  fix: "):
        worker.compute_ref_log_prob(batch_of(), SIZES)
    assert not calls_of(worker)


def test_the_columns_that_are_read() -> None:
    methods = registered_methods(DpoWorker)
    assert {name for name, spec in methods.items() if "ref_log_probs" in spec.optional} == {"update_dpo", "score_dpo"}
    assert methods["compute_ref_log_prob"].writes == ("ref_log_probs",)
