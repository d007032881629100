"""Workers of supervised training and the reward model: their requests to the engine, and their use of its results."""

from __future__ import annotations

import pytest
import torch

from mrl.controller.worker import registered_methods
from mrl.engine.scores import ScoreRequest, Scores
from mrl.workers.frozen import RewardModelWorker
from mrl.workers.messages import UpdateReport
from mrl.workers.supervised import SftWorker
from tests.workers.stubs import OUTCOME, SETUP, OfShards, Shards, StubEngine, batch_of, cut, make_place, make_rows


class SftOfShards(OfShards, SftWorker):
    """An SFT worker on one of several shards of this process."""


@pytest.mark.parametrize("with_holes", [True, False])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_the_loss_is_the_mean_over_what_is_to_be_learnt(num_shards: int, with_holes: bool) -> None:
    rows, chance = make_rows(with_holes=with_holes), torch.Generator().manual_seed(4)
    given = [-torch.rand(len(row.response), generator=chance, dtype=torch.float64) for row in rows]
    leaves, shards, places = [x.requires_grad_() for x in given], Shards(num_shards), cut(rows, num_shards)

    def work(shard: int) -> UpdateReport:
        worker = SftOfShards(make_place(), SETUP)
        worker.shards, worker.shard = shards, shard
        scores = Scores(log_probs_T=torch.cat([leaves[at] for at in places[shard]]))
        worker.engine = StubEngine(scores)  # type: ignore[assignment]
        report = worker.update_sft(batch_of([rows[at] for at in places[shard]]), [[1, len(places[shard]) - 1]])
        (call,) = worker.engine.calls  # type: ignore[attr-defined]
        assert call.request == ScoreRequest(), "at temperature 1, and no entropy"
        assert call.rows.columns.keys() == {"response_mask"}
        return report

    reports = shards.run(work)
    num_tokens = sum(sum(row.mask) for row in rows)
    pairs = [
        (x, is_written)
        for row, of_row in zip(rows, given, strict=True)
        for x, is_written in zip(of_row, row.mask, strict=True)
    ]
    expected = -sum(float(x) for x, is_written in pairs if is_written) / num_tokens
    assert all(report.parts.keys() == {"loss"} for report in reports)
    assert sum(report.parts["loss"] for report in reports) == pytest.approx(expected, rel=1e-9)
    assert {(report.grad_norm, report.learning_rate, report.applied) for report in reports} == {
        (OUTCOME.grad_norm, OUTCOME.learning_rate, OUTCOME.applied)
    }
    for row, leaf in zip(rows, leaves, strict=True):
        found = [0.0] * len(row.mask) if leaf.grad is None else leaf.grad.tolist()
        assert found == pytest.approx([-1 / num_tokens if is_written else 0.0 for is_written in row.mask])


@pytest.mark.parametrize("with_holes", [True, False])
def test_a_row_is_scored_by_its_learned_tokens(with_holes: bool) -> None:
    rows, worker = make_rows(with_holes=with_holes), SftWorker(make_place(), SETUP)
    given = [-torch.rand(len(row.response), dtype=torch.float64) for row in rows]
    worker.engine = StubEngine(Scores(log_probs_T=torch.cat(given)))  # type: ignore[assignment]
    batch = batch_of(rows)
    answer = worker.score_sft(batch, [[5, 3]])
    assert answer is not None
    assert answer.row_ids.tolist() == batch.row_ids.tolist()
    expected = [float(x[torch.tensor(row.mask, dtype=torch.bool)].sum()) for x, row in zip(given, rows, strict=True)]
    assert answer["sum_log_probs"].tolist() == pytest.approx(expected)
    assert answer["num_learned"].tolist() == [sum(row.mask) for row in rows]
    worker.engine = StubEngine(None)  # type: ignore[assignment]
    assert worker.score_sft(batch, [[8]]) is None


@pytest.mark.parametrize("with_holes", [True, False])
def test_the_likeliest_token_stands_beside_each_token_of_the_responses(with_holes: bool) -> None:
    rows, worker = make_rows(with_holes=with_holes), SftWorker(make_place(), SETUP)
    lengths = [len(row.response) for row in rows]
    greedy_T = torch.randint(0, 90, (sum(lengths),), generator=torch.Generator().manual_seed(6))
    worker.engine = StubEngine(Scores(greedy_T=greedy_T))  # type: ignore[assignment]
    batch = batch_of(rows).select("prompts", "responses")
    answer = worker.predict_sft(batch, [[5, 3]])
    assert answer is not None
    assert answer.row_ids.tolist() == batch.row_ids.tolist()
    expected = [tokens.tolist() for tokens in torch.split(greedy_T, lengths)]
    assert [tokens.tolist() for tokens in answer["greedy_tokens"].rows()] == expected
    (call,) = worker.engine.calls  # type: ignore[attr-defined]
    assert call.request == ScoreRequest(greedy=True)
    assert call.rows.before, "a token is foreseen, not judged in its turn"
    assert call.rows.tokens.tolist() == [token for row in rows for token in row.prompt + row.response]
    worker.engine = StubEngine(None)  # type: ignore[assignment]
    assert worker.predict_sft(batch, [[8]]) is None


def test_the_reward_model_judges_each_response_at_its_last_token() -> None:
    rows = make_rows("old_log_probs")
    batch, worker = batch_of(rows), RewardModelWorker(make_place(), SETUP)
    scores_B = torch.arange(8, dtype=torch.float64) / 3
    worker.engine = StubEngine(Scores(values_T=scores_B))  # type: ignore[assignment]
    answer = worker.compute_rm_score(batch, [[5, 3]])
    assert answer is not None
    assert answer.columns().keys() == {"rm_scores"}
    assert torch.equal(answer["rm_scores"], scores_B.float())  # type: ignore[arg-type]
    assert answer.row_ids.tolist() == batch.row_ids.tolist()
    (call,) = worker.engine.calls  # type: ignore[attr-defined]
    assert call.request == ScoreRequest()
    assert call.micro_batches == [[0, 1, 2, 3, 4], [5, 6, 7]]
    assert not call.rows.before, "the token is judged in its turn, not foreseen"
    assert call.rows.response_lengths.tolist() == [1] * 8
    assert call.rows.columns == {}
    assert call.rows.tokens.tolist() == [token for row in rows for token in row.prompt + row.response]
    worker.engine = StubEngine(None)  # type: ignore[assignment]
    assert worker.compute_rm_score(batch, [[8]]) is None


def test_what_is_declared_to_be_read_and_written() -> None:
    sft, judge = registered_methods(SftWorker)["update_sft"], registered_methods(RewardModelWorker)["compute_rm_score"]
    predicted = registered_methods(SftWorker)["predict_sft"]
    assert (set(predicted.reads), predicted.writes) == ({"prompts", "responses"}, ("greedy_tokens",))
    assert (set(sft.reads), sft.writes, sft.optional) == ({"prompts", "responses"}, (), ("response_mask",))
    assert (set(judge.reads), judge.writes, judge.optional) == ({"prompts", "responses"}, ("rm_scores",), ())
