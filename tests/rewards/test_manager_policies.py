"""The manager's limits: attempts per sample, failures per batch, and how they are reported."""

from __future__ import annotations

import dataclasses

import pytest

from mrl.config.reward import RewardFunctionConfig
from mrl.errors import RewardError
from mrl.events import Retried, SampleSkipped
from mrl.rewards import sample as sample_module
from mrl.rewards.outcome import Failure, Score
from tests.rewards.conftest import Bench, make_sample


def test_the_share_is_of_the_batch_and_not_of_all_batches_before(bench: Bench) -> None:
    manager = bench.manager(max_failed_share=0.25)
    manager.score([make_sample(row_id=row) for row in range(12)])
    with pytest.raises(RewardError, match=r"^reward: 2 of 4 samples have no reward \(2 bad_result\)"):
        manager.score([make_sample(do) for do in ("ok", "nan", "nan", "ok")])


def test_failures_of_a_batch_that_was_done_do_not_count_again(bench: Bench) -> None:
    manager = bench.manager(max_failed_share=0.5)
    for _ in range(2):
        tickets = [manager.submit(make_sample(do)) for do in ("nan", "ok")]
        assert sorted(manager.drain()) == tickets
        assert manager.drain() == {}
    assert len(manager.score([make_sample("nan"), make_sample()])) == 2


def test_a_share_is_allowed_up_to_its_end(bench: Bench) -> None:
    manager = bench.manager(max_failed_share=0.5)
    assert len(manager.score([make_sample("nan"), make_sample()])) == 2
    strict = bench.manager(max_failed_share=0.0)
    assert len(strict.score([make_sample()])) == 1
    with pytest.raises(RewardError, match=r"1 of 1 samples have no reward \(1 bad_result\); at most 0 % may fail"):
        strict.score([make_sample("nan")])


@pytest.mark.parametrize("retries", [0, 2])
def test_a_sample_is_tried_again_as_often_as_allowed(bench: Bench, retries: int) -> None:
    (outcome,) = bench.manager(retries=retries).score([make_sample("nan", 4)])
    assert isinstance(outcome, Failure)
    assert outcome.attempts == 1 + retries
    retried = [event for event in bench.events() if isinstance(event, Retried)]
    assert [event.attempt for event in retried] == list(range(2, 2 + retries))
    assert {event.what for event in retried} <= {"reward of row 4 (uid u4, source unit/test)"}
    skipped = [event for event in bench.events() if isinstance(event, SampleSkipped)]
    assert skipped == [SampleSkipped(4, "reward bad_result", "f0: the result is nan, not a finite number")]


def test_three_examples_are_shown_with_the_beginning_of_their_responses(bench: Bench) -> None:
    manager = bench.manager(num_workers=1, max_failed_share=0.74)
    responses = ["x" * 201, "y" * 200, "", ""]
    with pytest.raises(RewardError) as caught:
        manager.score([dataclasses.replace(make_sample("nan", 5), response=response) for response in responses])
    long, exact, *others = (line for line in str(caught.value).splitlines() if line.startswith("  row 5 "))
    assert long.endswith(f"; response '{'x' * 200}...'")
    assert exact.endswith(f"; response '{'y' * 200}'")
    assert len(others) == 1


def test_a_score_beyond_the_bound_is_a_failure_of_its_sample(bench: Bench) -> None:
    outcomes = bench.manager(max_abs_score=2.0).score([make_sample("ok", row) for row in range(4)])
    assert [getattr(outcome, "value", None) for outcome in outcomes] == [0.0, 1.0, 2.0, None]
    assert isinstance(outcomes[3], Failure)
    assert (outcomes[3].kind, outcomes[3].detail.startswith("the score 3 is farther")) == ("bad_result", True)
    assert [event.row_id for event in bench.events() if isinstance(event, SampleSkipped)] == [3]


def test_a_process_for_each_sample_where_that_is_wanted(bench: Bench) -> None:
    for concurrency in (1, 2):
        manager = bench.manager(num_workers=1, samples_per_worker=1, concurrency=concurrency, limit_s=5)
        outcomes = manager.score([make_sample("where", row) for row in range(3)])
        assert len({outcome.parts["f0/pid"] for outcome in outcomes if isinstance(outcome, Score)}) == 3


def test_secrets_stay_out_of_examples(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MRL_TEST_TOKEN", "canary-5up3r-hidden")
    sample = dataclasses.replace(make_sample("nan"), response="it is canary-5up3r-hidden")
    with pytest.raises(RewardError) as caught:
        bench.manager(max_failed_share=0.0).score([sample])
    assert "canary" not in str(caught.value)


def test_weights_and_options_reach_their_functions(bench: Bench) -> None:
    name = "tests.rewards.witness:as_told"
    functions = {
        "plain": RewardFunctionConfig(name=name),
        "minus": RewardFunctionConfig(name=name, weight=-0.5, options={"factor": 10, "shift": 2.0}),
        "shown": RewardFunctionConfig(name=name, weight=0.0, options={"shift": 100}),
    }
    (outcome,) = bench.manager(functions=functions).score([make_sample(row_id=3)])
    assert isinstance(outcome, Score)
    assert outcome.value == 3 - 0.5 * 32
    assert outcome.parts == {
        "plain": 3.0,
        "plain/half": 0.5,
        "minus": 32.0,
        "minus/half": 0.5,
        "shown": 103.0,
        "shown/half": 0.5,
    }


def test_a_sample_that_is_too_large_is_named(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(make_sample(row_id=7).to_json())
    monkeypatch.setattr(sample_module, "MAX_SAMPLE_BYTES", size)
    manager = bench.manager()
    (outcome,) = manager.score([make_sample(row_id=7)])
    assert isinstance(outcome, Score)
    monkeypatch.setattr(sample_module, "MAX_SAMPLE_BYTES", size - 1)
    with pytest.raises(RewardError, match=rf"row 7 .*: the sample has {size} bytes; at most {size - 1}"):
        manager.submit(make_sample(row_id=7))
    monkeypatch.undo()
    (outcome,) = manager.score([make_sample()])
    assert isinstance(outcome, Score), "what was refused is not waited for"
