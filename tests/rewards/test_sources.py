"""Functions that only score some data sources."""

from __future__ import annotations

import dataclasses

import pytest

from mrl.config.reward import RewardConfig, RewardFunctionConfig
from mrl.errors import RewardError
from mrl.events import EventLog
from mrl.rewards.manager import RewardManager
from mrl.rewards.outcome import Score, reward_metrics
from mrl.rewards.sample import Sample
from tests.rewards.conftest import HOSTILE, Bench, make_sample

FUNCTIONS = {
    "sums": RewardFunctionConfig(name=HOSTILE, sources=["gsm8k"]),
    "math": RewardFunctionConfig(name=HOSTILE, sources=["math/*", "aime"], weight=10.0),
    "seen": RewardFunctionConfig(name=HOSTILE, weight=0.0, sources=[]),
}


def of(data_source: str, row_id: int = 3) -> Sample:
    return dataclasses.replace(make_sample(row_id=row_id), data_source=data_source)


def test_a_pattern_is_compared_with_the_whole_name() -> None:
    asked = RewardFunctionConfig(name="x", sources=["math/*", "aime"])
    assert [asked.scores(name) for name in ("math/algebra/1", "aime", "math", "aime24", "Math/a")] == [
        *(True, True, False, False, False)
    ]
    assert RewardFunctionConfig(name="x").scores("anything")
    assert RewardFunctionConfig(name="x", sources=[]).scores("anything")


def test_each_sample_is_scored_by_the_functions_of_its_source(bench: Bench) -> None:
    samples = [of("gsm8k"), of("math/algebra", 4), of("aime", 5)]
    outcomes = bench.manager(functions=FUNCTIONS).score(samples)
    assert [(outcome.value, outcome.parts) for outcome in outcomes if isinstance(outcome, Score)] == [
        (3.0, {"sums": 3.0, "seen": 3.0}),
        (40.0, {"math": 4.0, "seen": 4.0}),
        (50.0, {"math": 5.0, "seen": 5.0}),
    ]


def test_a_source_that_no_function_with_a_weight_scores_stops_the_run(bench: Bench) -> None:
    with pytest.raises(RewardError) as caught:
        bench.manager(functions=FUNCTIONS).submit(of("code"))
    assert str(caught.value) == (
        'row 3 (uid u3, source code): no function with a weight scores the data source "code" '
        "(sums scores gsm8k; math scores math/*, aime; seen scores everything)\n"
        "  fix: add it to reward.functions.NAME.sources, or use a function without sources"
    )


def test_beside_a_reward_model_such_a_sample_has_no_score_of_the_functions(bench: Bench) -> None:
    settings = RewardConfig(functions={"sums": FUNCTIONS["sums"]}, num_workers=1)
    with RewardManager(settings, EventLog(bench.events_path), others_score=True) as manager:
        samples = [of("gsm8k"), of("code")]
        outcomes = manager.score(samples)
    assert [outcome.value for outcome in outcomes if isinstance(outcome, Score)] == [3.0, 0.0]
    metrics = reward_metrics(samples, outcomes)
    assert metrics["reward/score/mean"] == 3.0
    assert "reward/code/score/mean" not in metrics
    assert metrics["reward/code/num_samples"] == 1
