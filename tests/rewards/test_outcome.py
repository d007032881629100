"""Outcomes of a worker and their transport: numbers, parts, frames, failures, and the metrics of a batch."""

from __future__ import annotations

import json
import math
import os
import re
import signal
from fractions import Fraction

import pytest

from mrl.children import describe_status
from mrl.config.reward import RewardFunctionConfig
from mrl.rewards.messages import CONTROL, FrameError, FrameReader, control, frame, to_json
from mrl.rewards.outcome import (
    FAILURE_KINDS,
    MAX_ANSWER_LENGTH,
    BadResult,
    Failure,
    Score,
    answer_of,
    failure_reply,
    numbers_of,
    read_reply,
    reward_metrics,
    sum_of,
)
from mrl.rewards.sample import Sample
from mrl.rewards.worker import RewardFunction, score_sample
from tests.rewards.conftest import make_sample


@pytest.mark.parametrize("step", [1, 2, 5, 12, 13, 1000])
def test_frames_are_cut_wherever_the_bytes_come_in_pieces(step: int) -> None:
    frames = [(3, b"abc"), (CONTROL, b""), (1 << 40, b"x" * 20)]
    stream = b"".join(frame(*content) for content in frames)
    reader = FrameReader(max_bytes=20)
    frames_read = []
    for begin in range(0, len(stream), step):
        frames_read += list(reader.feed(stream[begin : begin + step]))
    assert frames_read == frames


def test_a_frame_may_be_as_long_as_allowed_and_no_longer() -> None:
    assert list(FrameReader(3).feed(frame(1, b"abc"))) == [(1, b"abc")]
    with pytest.raises(FrameError, match="a frame of 4 bytes; at most 3"):
        list(FrameReader(3).feed(frame(1, b"abcd")[:12]))


def test_what_belongs_to_no_sample_is_json() -> None:
    ((ticket, body),) = FrameReader(100).feed(control(ready=True, problems=["x"]))
    assert ticket == CONTROL
    assert json.loads(body) == {"ready": True, "problems": ["x"]}
    assert to_json("\ud83d\u00e9") == b'"\\ud83d\\u00e9"'
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_json(float("nan"))


def test_a_sample_arrives_with_all_that_it_has() -> None:
    sample = make_sample("nan", 5, deep={"list": [1, None, "é"]})
    assert Sample.all_from_json(sample.to_json()) == [sample]
    assert sample.name == "row 5 (uid u5, source unit/test)"


def test_results_are_numbers_within_bounds() -> None:
    assert numbers_of(2) == {"score": 2.0}
    assert numbers_of(Fraction(1, 4)) == {"score": 0.25}
    assert numbers_of({"score": True, "x" * 100: 1}) == {"score": 1.0, "x" * 100: 1.0}
    assert len(numbers_of({"score": 1.0} | {str(n): 0.0 for n in range(99)})) == 100
    for wrong in ({"score": 1.0} | {str(n): 0.0 for n in range(100)}, {"score": 1, "x" * 101: 1}, {"score": 1, "": 1}):
        with pytest.raises(BadResult):
            numbers_of(wrong)


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        ("x" * 200_000, "the result is of type str of length 200000, not a number"),
        ([1.0, 2.0], "the result is of type list of length 2, not a number"),
        (1j, "the result is of type complex, not a number"),
        (object(), "the result is of type object, not a number"),
        (10**400, "the result is a whole number too large for a float"),
        (-math.inf, "the result is -inf, not a finite number"),
        ({"accuracy": 1.0}, 'the dictionary has no "score"; it has accuracy'),
        ({}, 'the dictionary has no "score"; it has nothing'),
        ({"score": 1.0, "length": "42"}, '"length" is of type str of length 2, not a number'),
        ({"score": 1.0, "share": math.nan}, '"share" is nan, not a finite number'),
        ({"score": None}, '"score" is None; a `return` may be missing'),
        ({"score": {"score": 1.0}}, '"score" is of type dict of length 1, not a number'),
        ({"score": 1.0, 3: 1.0}, "3 is the name of a part"),
        ({"score": 1, "a\nb": 1}, "names must be text of 1 to 100 printable characters"),
        ({"score": 1.0} | dict.fromkeys(map(str, range(5000)), 1.0), "the dictionary has 5001 entries; at most 100"),
    ],
    ids=lambda part: repr(part)[:14],
)
def test_a_result_that_is_no_number_says_why(result: object, problem: str) -> None:
    with pytest.raises(BadResult, match=re.escape(problem)):
        numbers_of(result)


def test_an_answer_is_text_and_travels_with_the_score() -> None:
    assert numbers_of({"score": 1, "answer": "12"}) == {"score": 1.0}
    assert numbers_of({"score": 1, "answer": None}) == {"score": 1.0}
    assert numbers_of({"score": 1, "answer": 12}) == {"score": 1.0, "answer": 12.0}, "a number is a part"
    assert [answer_of(result) for result in (1.0, {"score": 1}, {"score": 1, "answer": 12})] == [None] * 3
    assert [answer_of({"score": 1, "answer": none}) for none in (None, "")] == [""] * 2, "it was looked for"
    assert answer_of({"answer": "x" * 5000}) == "x" * MAX_ANSWER_LENGTH
    functions = [
        function("format", 1.0, 1),
        function("last", 1.0, {"score": 0, "answer": None}),
        function("math", 1.0, {"score": 0, "answer": "1/2"}),
        function("qa", 1.0, {"score": 0, "answer": "half"}),
    ]
    reply = score_sample(functions, make_sample().to_json(), 1 << 28)
    (outcome,) = read_reply(to_json(reply), 1)
    assert isinstance(outcome, Score)
    assert (outcome.value, outcome.answer) == (1.0, "1/2"), "of the first function that has one"
    assert sum_of([Score(1.0, {}, 0.0, ""), Score(2.0, {}, 0.0, "x"), Score(0.5, {}, 0.0)]) == Score(3.5, {}, 0.0, "x")


def test_long_details_are_cut() -> None:
    assert failure_reply("raised", "x" * 2000, 0.5) == {"failure": "raised", "detail": "x" * 2000, "seconds": 0.5}
    assert failure_reply("raised", "x" * 2001, 0.5)["detail"] == "x" * 2000 + " ..."


@pytest.mark.parametrize("kind", FAILURE_KINDS)
def test_a_failure_is_read_as_it_was_told(kind: str) -> None:
    body = to_json({"failure": kind, "detail": "why", "seconds": 1.5})
    failure = Failure(kind, "why", 1.5, attempts=3)  # type: ignore[arg-type]
    assert read_reply(body, 3) == [failure]
    assert read_reply(body, 3, 2) == [failure, failure]


def test_a_score_is_read_as_it_was_told() -> None:
    score = {"value": 2, "parts": {"a": 1, "a/b": -0.5}}
    body = to_json({"scores": [score, score | {"value": 3}], "seconds": 0.25})
    parts = {"a": 1.0, "a/b": -0.5}
    assert read_reply(body, 1, 2) == [Score(2.0, parts, 0.25), Score(3.0, parts, 0.25)]
    (wrong,) = read_reply(body, 1)
    assert isinstance(wrong, Failure)
    assert wrong.detail == "the reply of its worker cannot be read: ValueError('2 scores of 1 samples')"


def test_outcomes_add_up_unless_one_is_a_failure() -> None:
    one, other = Score(1.0, {"a": 1.0}, 0.5), Score(-3.0, {"b": 3.0}, 0.25)
    late = Failure("timeout", "why", 1.0)
    assert sum_of([one, other]) == Score(-2.0, {"a": 1.0, "b": 3.0}, 0.5)
    assert sum_of([one, late]) == late
    huge = Score(1e308, {}, 0.5)
    assert sum_of([one, other], 2.0) == sum_of([one, other]), "at the bound"
    what = "the score -2 is farther from 0 than reward.max_abs_score=1.9"
    assert sum_of([one, other], 1.9) == Failure("bad_result", what, 0.5)
    assert sum_of([huge, huge]) == Failure("bad_result", "the weighted sum is not a finite number", 0.5)


@pytest.mark.parametrize("parts", [{"a": True, "b": None}, {"a": "1"}, [1.0]], ids=repr)
def test_parts_are_numbers_too(parts: object) -> None:
    (outcome,) = read_reply(to_json({"scores": [{"value": 1.0, "parts": parts}], "seconds": 0.0}), 2)
    assert isinstance(outcome, Failure)
    assert outcome.kind == "crashed"
    assert outcome.attempts == 2


def function(label: str, weight: float, result: object) -> RewardFunction:
    """Return a function that returns this result, or raises it."""

    def give(sample: Sample, plus: float = 0.0) -> object:
        if isinstance(result, BaseException):
            raise result
        return result if plus == 0.0 else float(str(result)) + plus

    return RewardFunction(label, RewardFunctionConfig(name="own:function", weight=weight, options={"plus": 0.0}), give)


def test_the_sum_is_weighted_and_parts_bear_their_functions_names() -> None:
    functions = [function("a", 2.0, {"score": 1.5, "x": 9}), function("b", -1.0, 4), function("c", 0.0, 100)]
    reply = score_sample(functions, make_sample().to_json(), 1 << 28)
    assert reply.pop("seconds") >= 0
    assert reply == {"scores": [{"value": 2 * 1.5 - 4, "parts": {"a": 1.5, "a/x": 9.0, "b": 4.0, "c": 100.0}}]}


def test_a_failure_names_the_function_and_ends_the_sample() -> None:
    later = function("c", 1.0, RuntimeError("never called"))
    for wrong, kind, detail in (
        (float("inf"), "bad_result", "b: the result is inf, not a finite number"),
        (MemoryError(), "memory", "b: more than 256 MiB"),
    ):
        reply = score_sample(
            [function("a", 1.0, 1), function("b", 1.0, wrong), later], make_sample().to_json(), 1 << 28
        )
        assert (reply["failure"], reply["detail"]) == (kind, detail)
    reply = score_sample([function("a", 1.0, ValueError("oh"))], make_sample().to_json(), 1 << 28)
    assert (reply["failure"], reply["detail"].split(" (")[0]) == ("raised", "a: ValueError: oh")


def test_the_end_of_a_process_in_words() -> None:
    killed = "its process was ended by signal 9 (Killed; out of memory, or it closed its channel)"
    assert describe_status(int(signal.SIGKILL)) == killed
    assert describe_status(int(signal.SIGTERM)) == "its process was ended by signal 15 (Terminated)"
    pid = os.posix_spawn("/bin/sh", ["sh", "-c", "exit 7"], {})
    assert describe_status(os.waitpid(pid, 0)[1]) == "its process exited with status 7"


def test_figures_stand_for_their_own_source() -> None:
    samples = [Sample(**{**vars(make_sample(row_id=row)), "data_source": "ab"[row % 2]}) for row in range(5)]
    outcomes = [
        Score(1.0, {"f": 1.0, "f/x": 5.0}, 0.1),
        Score(-2.0, {"f": -2.0}, 3.0),
        Score(4.0, {"f": 4.0, "f/x": 7.0}, 0.2),
        Failure("memory", "", 0.4),
        Failure("timeout", "", 0.6),
    ]
    metrics = reward_metrics(samples, outcomes)

    def figures(prefix: str, **columns: tuple[float, float, float]) -> dict[str, float]:
        return {
            f"{prefix}/{column}/{name}": number
            for column, three in columns.items()
            for name, number in zip(("mean", "min", "max"), three, strict=True)
        }

    parts = {"f/x": (6.0, 5.0, 7.0)}
    assert metrics == {
        "reward/num_samples": 5,
        "reward/a/num_samples": 3,
        "reward/b/num_samples": 2,
        "reward/failed_share": 0.4,
        "reward/a/failed_share": pytest.approx(1 / 3),
        "reward/b/failed_share": 0.5,
        **figures("reward", score=(1.0, -2.0, 4.0), f=(1.0, -2.0, 4.0), **parts),
        **figures("reward/a", score=(2.5, 1.0, 4.0), f=(2.5, 1.0, 4.0), **parts),
        **figures("reward/b", score=(-2.0, -2.0, -2.0), f=(-2.0, -2.0, -2.0)),
        **{f"reward/failed/{kind}": int(kind in ("memory", "timeout")) for kind in FAILURE_KINDS},
        "reward/seconds/max": 3.0,
    }
    assert reward_metrics([], [])["reward/failed_share"] == 0.0
    failed_only = reward_metrics(samples[3:], outcomes[3:])
    assert failed_only["reward/failed_share"] == 1.0
    assert "reward/score/mean" not in failed_only


def test_an_answer_that_no_frame_holds_is_a_bad_result_that_says_so() -> None:
    """Several functions, each within its limit of parts, can return more than a worker may send."""
    parts = {f"{number:02}" + "\N{GRINNING FACE}" * 90: 0.5 for number in range(99)}
    reply = score_sample([function("talk", 1.0, {"score": 1.0} | parts)], make_sample().to_json(), 1 << 30)
    assert reply["failure"] == "bad_result"
    assert "talk: the 100 parts of all functions take " in reply["detail"]
    assert reply["detail"].endswith("bytes; at most 65536")
