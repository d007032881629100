"""The critic's loss, its reports and its requests, compared with formulas in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mrl.algos.aggregate import AGGREGATIONS
from mrl.config.algorithm import AlgorithmConfig, LossConfig
from mrl.controller.worker import registered_methods
from mrl.engine.scores import ScoreRequest, Scores
from mrl.workers.critic import CriticWorker
from mrl.workers.messages import UpdateReport
from tests.workers.by_hand import Row, critic_loss
from tests.workers.stubs import OUTCOME, SETUP, OfShards, Shards, StubEngine, batch_of, cut, make_place, make_rows

HORIZON = 50
LOSS = LossConfig(clip_low=0.1, clip_high=0.2, value_clip=0.4)


class CriticOfShards(OfShards, CriticWorker):
    """A critic on one of several shards of this process."""


def worker_of(loss: LossConfig, scores: Scores | None, shards: Shards, shard: int = 0) -> CriticOfShards:
    worker = CriticOfShards(make_place(), SETUP, AlgorithmConfig(advantage="gae", loss=loss), HORIZON)
    worker.engine = StubEngine(scores)  # type: ignore[assignment]
    worker.shards, worker.shard = shards, shard
    return worker


def values_of(rows: list[Row]) -> list[torch.Tensor]:
    """Return random values for each row's tokens."""
    chance = torch.Generator().manual_seed(2)
    return [torch.randn(len(row.response), generator=chance, dtype=torch.float64).requires_grad_() for row in rows]


def check(loss: LossConfig, rows: list[Row], num_shards: int, horizon: int = HORIZON) -> dict[str, float]:
    """Compare an update's reports and gradients with those of the formulas. Return the reports."""
    ours, theirs, shards, places = values_of(rows), values_of(rows), Shards(num_shards), cut(rows, num_shards)

    def work(shard: int) -> UpdateReport:
        values_T = torch.cat([ours[at] for at in places[shard]])
        worker = worker_of(loss, Scores(values_T=values_T), shards, shard)
        report = worker.update_critic(batch_of([rows[at] for at in places[shard]]), [[1, len(places[shard]) - 1]])
        (call,) = worker.engine.calls  # type: ignore[attr-defined]
        assert call.request == ScoreRequest()
        assert call.rows.columns.keys() == {"response_mask", "values", "returns"}
        assert call.rows.before, "a value is that of the state before its token"
        return report

    reports: dict[str, float] = {}
    for report in shards.run(work):
        assert (report.grad_norm, report.learning_rate) == (OUTCOME.grad_norm, OUTCOME.learning_rate)
        assert report.applied
        for name, value in report.parts.items():
            reports[name] = reports.get(name, 0.0) + value
    expected_loss, expected = critic_loss(rows, loss, horizon, theirs)
    expected_loss.backward()  # type: ignore[no-untyped-call]
    assert reports == pytest.approx(expected, rel=1e-9)
    for mine, other in zip(ours, theirs, strict=True):
        gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in (mine, other)]
        assert torch.allclose(*gradients, rtol=1e-9, atol=1e-12)
    return reports


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
@pytest.mark.parametrize(("value_clip", "num_shards"), [(None, 2), (0.15, 1), (0.4, 2)])
def test_values_are_held_within_their_own_range(value_clip: float | None, aggregation: str, num_shards: int) -> None:
    loss = replace(LOSS, value_clip=value_clip, aggregation=aggregation)
    reports = check(loss, make_rows("values", "returns"), num_shards)
    assert (reports["vf_clipfrac"] > 0) == (value_clip is not None)


def test_without_a_mask_every_token_is_learnt() -> None:
    check(LOSS, make_rows("values", "returns", with_holes=False), 2)


def test_the_horizon_is_that_of_the_configuration_or_the_longest_response() -> None:
    loss, rows = replace(LOSS, aggregation="seq-mean-token-sum-norm"), make_rows("values", "returns")
    check(loss, rows, 2, horizon=HORIZON)
    check(replace(loss, horizon_tokens=9), rows, 2, horizon=9)


def test_values_are_a_column_of_the_response_tokens() -> None:
    rows = make_rows("old_log_probs")
    batch, values_T = batch_of(rows), torch.cat(values_of(rows)).detach()
    worker = worker_of(LOSS, Scores(values_T=values_T), Shards(1))
    answer = worker.compute_values(batch, [[3, 5]])
    assert answer is not None
    assert answer.columns().keys() == {"values"}
    assert torch.equal(answer.values("values"), values_T.float())
    assert answer.lengths("values").tolist() == [len(row.response) for row in rows]
    assert answer.row_ids.tolist() == batch.row_ids.tolist()
    (call,) = worker.engine.calls  # type: ignore[attr-defined]
    assert call.request == ScoreRequest()
    assert call.micro_batches == [[0, 1, 2], [3, 4, 5, 6, 7]]
    assert call.rows.before
    assert worker_of(LOSS, None, Shards(1)).compute_values(batch, [[8]]) is None


def test_what_is_declared_to_be_read_and_written() -> None:
    specs = registered_methods(CriticWorker)
    declared = {name: (set(spec.reads), set(spec.writes), set(spec.optional)) for name, spec in specs.items()}
    assert declared["compute_values"] == ({"prompts", "responses"}, {"values"}, set())
    assert declared["compute_advantages"][1] == {"advantages", "returns"}
    assert declared["update_critic"] == ({"prompts", "responses", "values", "returns"}, set(), {"response_mask"})
