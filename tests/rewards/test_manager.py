"""Policies: retry, drop, stop; order, counts, events and messages."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from mrl.config.reward import RewardFunctionConfig
from mrl.errors import RewardError
from mrl.events import Retried, SampleSkipped
from mrl.rewards.outcome import Failure, Score, read_reply, reward_metrics
from tests.rewards import hostile
from tests.rewards.conftest import HOSTILE, Bench, make_sample


def test_outcomes_stand_in_the_order_of_the_samples(bench: Bench) -> None:
    manager = bench.manager(num_workers=4)
    outcomes = manager.score([make_sample("sleep" if row % 3 == 0 else "ok", row, s=0.05) for row in range(60)])
    assert [outcome.value for outcome in outcomes if isinstance(outcome, Score)] == [
        1.0 if row % 3 == 0 else row for row in range(60)
    ]
    assert manager.score([]) == []


def test_a_second_attempt(bench: Bench, tmp_path: Path) -> None:
    manager = bench.manager(retries=1)
    once, always = manager.score([make_sample("fail once", file=str(tmp_path / "tried")), make_sample("os._exit", 1)])
    assert isinstance(once, Score)
    assert isinstance(always, Failure)
    assert always.attempts == 2
    left = "crashed: its process exited with status"
    retried = {(event.what, event.attempt, event.reason) for event in bench.events() if isinstance(event, Retried)}
    assert retried == {
        ("reward of row 0 (uid u0, source unit/test)", 2, f"{left} 1"),
        ("reward of row 1 (uid u1, source unit/test)", 2, f"{left} 0"),
    }
    (skipped,) = (event for event in bench.events() if isinstance(event, SampleSkipped))
    assert skipped == SampleSkipped(1, "reward crashed", "its process exited with status 0")


def test_stop_at_the_first_failure(bench: Bench) -> None:
    manager = bench.manager(on_failure="stop", retries=1)
    with pytest.raises(RewardError) as caught:
        manager.score([make_sample(row_id=1), make_sample("None", 2), make_sample(row_id=3)])
    assert str(caught.value) == (
        "reward: no reward for row 2 (uid u2, source unit/test): bad_result: f0: the result is None; a `return` "
        "may be missing, 2 attempts; response 'forty-two'\n"
        "  fix: correct the reward function, or set reward.on_failure=drop to continue without such samples"
    )


def test_too_many_failures_stop_the_run_with_examples(bench: Bench) -> None:
    manager = bench.manager(num_workers=1, max_failed_share=0.2)
    doings = ["ok", "nan", "os._exit", "ok", "None", "ok", "ok", "ok", "ok", "ok"]
    with pytest.raises(RewardError) as caught:
        manager.score([make_sample(do, row) for row, do in enumerate(doings)])
    assert str(caught.value) == (
        "reward: 3 of 10 samples have no reward (1 crashed, 2 bad_result); at most 20 % may fail\n"
        "  row 1 (uid u1, source unit/test): bad_result: f0: the result is nan, not a finite number; "
        "response 'forty-two'\n"
        "  row 2 (uid u2, source unit/test): crashed: its process exited with status 0; response 'forty-two'\n"
        "  row 4 (uid u4, source unit/test): bad_result: f0: the result is None; a `return` may be missing; "
        "response 'forty-two'\n"
        "  fix: correct the reward function, or raise reward.max_failed_share"
    )


def test_the_share_is_that_of_each_batch(bench: Bench) -> None:
    manager = bench.manager(max_failed_share=0.25)
    for _ in range(3):
        outcomes = manager.score([make_sample(do) for do in ("ok", "ok", "nan", "ok")])
        assert [type(outcome) for outcome in outcomes] == [Score, Score, Failure, Score]


def test_a_batch_that_cannot_be_saved_stops_early(bench: Bench) -> None:
    manager = bench.manager(num_workers=2, limit_s=1.0, max_failed_share=0.1)
    begin = time.monotonic()
    with pytest.raises(RewardError, match=r"^reward: 5 of 40 samples have no reward \(5 timeout\)|^reward: 6 of 40"):
        manager.score([make_sample("endless", row) for row in range(40)])
    assert time.monotonic() - begin < 15, "not the twenty seconds that all of them would take"


def test_samples_may_come_one_by_one(bench: Bench) -> None:
    manager = bench.manager()
    first = manager.submit(make_sample(row_id=4))
    with pytest.raises(RewardError, match="1 submitted samples are not finished"):
        manager.score([make_sample()])
    second = manager.submit(make_sample("nan"))
    done: dict[int, Any] = manager.drain()
    assert set(done) == {first, second}
    assert (done[first].value, done[second].kind) == (4.0, "bad_result")
    assert manager.drain() == {}


def test_weights_and_parts(bench: Bench) -> None:
    functions = {
        "count": RewardFunctionConfig(name="tests.rewards.hostile:count", weight=2.0),
        "long": RewardFunctionConfig(name="overlong", weight=10, options={"max_tokens": 4, "buffer_tokens": 2}),
        "seen": RewardFunctionConfig(name=HOSTILE, weight=0),
    }
    manager = bench.manager(functions=functions)
    (outcome,) = manager.score([make_sample("parts", 3)])
    assert isinstance(outcome, Score)
    assert outcome.value == 2 * 3 - 10 * 0.5
    assert outcome.parts == {"count": 3.0, "long": -0.5, "seen": 0.5, "seen/length": 3.0}


def test_a_sum_that_overflows(bench: Bench) -> None:
    huge = {"a": RewardFunctionConfig(name="tests.rewards.hostile:count", weight=1e308)}
    (outcome,) = bench.manager(functions=huge).score([make_sample(row_id=1000)])
    assert isinstance(outcome, Failure)
    assert (outcome.kind, outcome.detail) == ("bad_result", "a: the weighted sum is not a finite number")


def test_no_more_than_so_many_per_second(bench: Bench) -> None:
    manager = bench.manager(num_workers=4, max_samples_per_s=20.0)
    begin = time.monotonic()
    outcomes = manager.score([make_sample() for _ in range(11)])
    assert time.monotonic() - begin >= 0.5
    assert all(isinstance(outcome, Score) and outcome.seconds < 0.2 for outcome in outcomes)


def test_metrics_per_source() -> None:
    samples = [make_sample(row_id=row) for row in range(4)]
    outcomes = [
        Score(1.0, {"answer": 1.0}, 0.1),
        Failure("timeout", "", 2.0),
        Score(0.0, {"answer": 0.5}, 0.1),
        Failure("raised", "", 0.1),
    ]
    metrics = reward_metrics(samples, outcomes)
    assert metrics["reward/score/mean"] == 0.5, "a failure is no zero"
    assert metrics["reward/unit/test/answer/mean"] == 0.75
    assert metrics["reward/unit/test/answer/min"] == 0.5
    assert metrics["reward/unit/test/num_samples"] == 4
    assert metrics["reward/unit/test/failed_share"] == 0.5
    assert {kind: metrics[f"reward/failed/{kind}"] for kind in ("timeout", "raised", "crashed")} == {
        "timeout": 1,
        "raised": 1,
        "crashed": 0,
    }
    assert metrics["reward/seconds/max"] == 2.0
    failed_only = reward_metrics(samples[1:2], outcomes[1:2])
    assert "reward/score/mean" not in failed_only
    assert failed_only["reward/failed_share"] == 1.0


@pytest.mark.parametrize(
    "text",
    ["half a pair \ud83d", "\0", "\N{GRINNING FACE} " * 50_000, "\u2028\x85"],
    ids=["surrogate", "nul", "long", "breaks"],
)
def test_any_text_arrives_as_it_is(bench: Bench, text: str) -> None:
    manager = bench.manager("exact_match")
    sample = make_sample()
    same = type(sample)(**{**vars(sample), "response": text, "ground_truth": [text]})
    (outcome,) = manager.score([same])
    assert isinstance(outcome, Score)
    assert outcome.value == 1.0


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("ground_truth", {1, 2}, "Object of type set is not JSON serializable"),
        ("ground_truth", float("nan"), "Out of range float values are not JSON compliant"),
        ("extra_info", {"image": b"png"}, "Object of type bytes is not JSON serializable"),
    ],
    ids=["set", "nan", "bytes"],
)
def test_samples_are_plain_data(bench: Bench, field: str, value: object, message: str) -> None:
    sample = type(make_sample())(**{**vars(make_sample(row_id=7)), field: value})
    with pytest.raises(RewardError) as caught:
        bench.manager().submit(sample)
    assert str(caught.value).splitlines() == [
        f"row 7 (uid u7, source unit/test): the sample is not plain data: {message}"
        + (": nan" if message.startswith("Out") and ": nan" in str(caught.value) else ""),
        "  fix: use only text, finite numbers, lists and dictionaries in ground_truth and extra_info",
    ]


START = {
    "tests.rewards.nowhere:score": 'no module "tests.rewards.nowhere" (from "tests.rewards.nowhere:score")',
    "tests.rewards.hostile:scor": '"tests.rewards.hostile" has no "scor"',
    "tests.rewards.hostile:SOURCE": '"tests.rewards.hostile" has no "SOURCE"',
    "tests.rewards.hostile:ACTIONS": '"tests.rewards.hostile:ACTIONS" is a dict, not a function',
    "tests.rewards.bad_import:score": "SystemExit: no licence",
}


@pytest.mark.parametrize("name", START)
def test_functions_that_cannot_be_loaded(bench: Bench, name: str) -> None:
    with pytest.raises(RewardError) as caught:
        bench.manager("gsm8k", name)
    assert str(caught.value).startswith(f"reward.functions.f1: {name} cannot be loaded: ")
    assert START[name] in str(caught.value)
    assert bench.settle(0) == set()


@pytest.mark.skipif(importlib.util.find_spec("math_verify") is not None, reason="the extra `math` is installed")
def test_an_extra_that_is_missing(bench: Bench) -> None:
    with pytest.raises(RewardError) as caught:
        bench.manager("math_verify")
    assert str(caught.value) == (
        "reward.functions.f0: math_verify cannot be loaded: math_verify is required but not installed\n"
        '  fix: pip install "mrl[math]"'
    )


def test_every_function_that_cannot_be_loaded_is_named(bench: Bench) -> None:
    with pytest.raises(RewardError) as caught:
        bench.manager("tests.rewards.nowhere:score", "gsm8k", "tests.rewards.hostile:ACTIONS")
    assert [line.split(" ")[0] for line in str(caught.value).splitlines() if "cannot" in line] == [
        "reward.functions.f0:",
        "reward.functions.f2:",
    ]


def test_options_are_tried_before_the_first_sample(bench: Bench) -> None:
    function = RewardFunctionConfig(name="tests.rewards.hostile:count", options={"strict": True})
    with pytest.raises(RewardError) as caught:
        bench.manager(functions={"mine": function})
    assert "got an unexpected keyword argument 'strict'; the function is count(sample: 'Sample') -> 'float'" in str(
        caught.value
    )


def test_an_import_that_does_not_end(bench: Bench) -> None:
    with pytest.raises(RewardError) as caught:
        bench.manager("tests.rewards.slow_import:score", num_workers=1, start_limit_s=0.3)
    assert str(caught.value) == ("no reward worker can start; 3 in a row failed: it was not ready within 0.3 s")


def test_a_supervisor_that_is_gone(bench: Bench) -> None:
    manager = bench.manager()
    supervisor = min(bench.processes())
    manager.submit(make_sample("sleep", s=0.4))
    os.kill(supervisor, signal.SIGKILL)
    with pytest.raises(RewardError) as caught:
        manager.drain()
    assert str(caught.value) == (
        f"reward: the supervisor of the reward workers (pid {supervisor}) exited with status -9\n"
        "  fix: see its last output on the run's standard error"
    )


def test_a_closed_manager_says_so(bench: Bench) -> None:
    manager = bench.manager()
    manager.close()
    with pytest.raises(RewardError, match="the reward workers have already ended"):
        manager.score([make_sample()])


@pytest.mark.parametrize(
    "forged",
    [
        b"",
        b"[]",
        b"{}",
        b"nonsense",
        b'{"scores":[{"value":NaN,"parts":{}}],"seconds":0}',
        b'{"failure":"x","detail":"","seconds":0}',
    ],
)
def test_an_answer_that_was_forged_is_a_crash(forged: bytes) -> None:
    (outcome,) = read_reply(forged, 1)
    assert isinstance(outcome, Failure)
    assert outcome.kind == "crashed"
    assert outcome.detail.startswith("the reply of its worker cannot be read: ")


def test_the_hostile_module_is_the_one_that_workers_see() -> None:
    assert Path(hostile.__file__).parent == Path(__file__).parent
