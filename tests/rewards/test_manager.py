"""Policies: retry, drop, stop; order, counts, events and messages."""

from __future__ import annotations

import dataclasses
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
from mrl.rewards.outcome import Failure, Score, read_reply
from mrl.spans import SPANS, read_spans
from tests.rewards.conftest import Bench, make_sample


def test_outcomes_stand_in_the_order_of_the_samples(bench: Bench) -> None:
    manager = bench.manager(num_workers=4)
    outcomes = manager.score([make_sample("sleep" if row % 3 == 0 else "ok", row, s=0.05) for row in range(60)])
    assert [outcome.value for outcome in outcomes if isinstance(outcome, Score)] == [
        1.0 if row % 3 == 0 else row for row in range(60)
    ]
    assert manager.score([]) == []


def test_a_second_attempt(bench: Bench, tmp_path: Path) -> None:
    manager = bench.manager(retries=1)
    once, always = manager.score([make_sample("fail once", file=str(tmp_path / "tried")), make_sample("os._exit 3", 1)])
    assert isinstance(once, Score)
    assert isinstance(always, Failure)
    assert always.attempts == 2
    left = "crashed: its process exited with status"
    retried = {(event.what, event.attempt, event.reason) for event in bench.events() if isinstance(event, Retried)}
    assert retried == {
        ("reward of row 0 (uid u0, source unit/test)", 2, f"{left} 1"),
        ("reward of row 1 (uid u1, source unit/test)", 2, f"{left} 3"),
    }
    (skipped,) = (event for event in bench.events() if isinstance(event, SampleSkipped))
    assert skipped == SampleSkipped(1, "reward crashed", "its process exited with status 3")


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
    doings = ["ok", "nan", "os._exit 3", "ok", "None", "ok", "ok", "ok", "ok", "ok"]
    with pytest.raises(RewardError) as caught:
        manager.score([make_sample(do, row) for row, do in enumerate(doings)])
    first, *examples, fix = str(caught.value).splitlines()
    assert first == "reward: 3 of 10 samples have no reward (1 crashed, 2 bad_result); at most 20 % may fail"
    assert [example.split()[:2] for example in examples] == [["row", "1"], ["row", "2"], ["row", "4"]]
    assert examples[1].endswith("crashed: its process exited with status 3; response 'forty-two'")
    assert "reward.max_failed_share" in fix


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


def test_any_text_arrives_as_it_is(bench: Bench) -> None:
    texts = ["half a pair \ud83d", "\0", "\N{GRINNING FACE} " * 50_000, "\u2028\x85"]
    samples = [dataclasses.replace(make_sample(), response=text, ground_truth=[text]) for text in texts]
    outcomes = bench.manager("exact_match").score(samples)
    assert [outcome.value for outcome in outcomes if isinstance(outcome, Score)] == [1.0] * len(texts)


@pytest.mark.parametrize(
    ("field", "value"),
    [("ground_truth", {1, 2}), ("ground_truth", float("nan")), ("extra_info", {"image": b"png"})],
    ids=["set", "nan", "bytes"],
)
def test_samples_are_plain_data(field: str, value: object) -> None:
    sample = dataclasses.replace(make_sample(row_id=7), **{field: value})  # type: ignore[arg-type]
    with pytest.raises(RewardError, match=r"^row 7 .*: the sample is not plain data: .*not JSON"):
        sample.to_json()


UNLOADABLE = {
    "tests.rewards.nowhere:score": 'no module "tests.rewards.nowhere" (from "tests.rewards.nowhere:score")',
    "tests.rewards.hostile:scor": '"tests.rewards.hostile" has no "scor"',
    "tests.rewards.hostile:ACTIONS": '"tests.rewards.hostile:ACTIONS" is a dict, not a function',
    "tests.rewards.bad_import:score": "SystemExit: no licence",
}


def test_every_function_that_cannot_be_loaded_is_named_with_its_reason(bench: Bench) -> None:
    with pytest.raises(RewardError) as caught:
        bench.manager("gsm8k", *UNLOADABLE)
    complaints = [line for line in str(caught.value).splitlines() if "cannot be loaded" in line]
    assert len(complaints) == len(UNLOADABLE)
    for number, (name, reason) in enumerate(UNLOADABLE.items(), 1):
        assert complaints[number - 1].startswith(f"reward.functions.f{number}: {name} cannot be loaded: ")
        assert reason in complaints[number - 1]
    assert bench.settle(0) == set()


@pytest.mark.skipif(importlib.util.find_spec("math_verify") is not None, reason="the extra `math` is installed")
def test_an_extra_that_is_missing(bench: Bench) -> None:
    with pytest.raises(RewardError) as caught:
        bench.manager("math_verify")
    assert str(caught.value) == (
        "reward.functions.f0: math_verify cannot be loaded: math_verify is required but not installed\n"
        '  fix: pip install "mrl[math]"'
    )


def test_options_are_tried_before_the_first_sample(bench: Bench) -> None:
    function = RewardFunctionConfig(name="tests.rewards.hostile:count", options={"strict": True})
    with pytest.raises(RewardError) as caught:
        bench.manager(functions={"mine": function})
    assert "got an unexpected keyword argument 'strict'; the function is count(sample: 'Sample') -> 'float'" in str(
        caught.value
    )


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


def test_workers_report_their_samples_while_a_trace_is_recorded(bench: Bench, tmp_path: Path) -> None:
    manager = bench.manager()
    manager.score([make_sample()])
    SPANS.begin(tmp_path / "spans")
    manager.score([make_sample("sleep", 1, s=0.1), make_sample("os._exit 3", 2)])
    SPANS.end()
    manager.score([make_sample()])
    workers = {name: spans for name, spans in read_spans(tmp_path / "spans").items() if name}
    assert len(workers) >= 2, "also a worker without samples"
    assert all(name.startswith("reward worker ") for name in workers)
    lengths = sorted((span.end or 0) - span.begin for spans in workers.values() for span in spans)
    assert len(lengths) == 2
    assert 0.1e9 <= lengths[1] < 5e9
