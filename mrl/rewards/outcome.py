"""What becomes of a sample: a score, or a failure with its kind, never a made-up 0; and the metrics of a batch."""

from __future__ import annotations

import inspect
import json
import math
import numbers
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mrl.rewards.sample import Sample

FailureKind = Literal["timeout", "crashed", "raised", "bad_result", "memory"]
FAILURE_KINDS: tuple[FailureKind, ...] = ("timeout", "crashed", "raised", "bad_result", "memory")
_MAX_DETAIL_LENGTH = 2000
_MAX_NAME_LENGTH = 100
_MAX_PARTS = 100
MAX_ANSWER_LENGTH = 1000


@dataclass(frozen=True)
class Score:
    """The weighted sum, and what it was made of: function (or `function/part`) -> number.

    Without parts no function scores the sample's data source, and what a reward model says is all that it gets.
    """

    value: float
    parts: dict[str, float]
    seconds: float
    answer: str | None = None
    """What a function took for the answer, empty where it found none; None where no function says so."""


@dataclass(frozen=True)
class Failure:
    """A sample without a score: what kind of failure, and what is known about it."""

    kind: FailureKind
    detail: str
    seconds: float
    attempts: int = 1


Outcome = Score | Failure


class BadResult(ValueError):
    """What a reward function or an environment returned is not what it may return."""


def numbers_of(result: Any) -> dict[str, float]:
    """Return the numbers of what a reward function returned, `score` among them."""
    if isinstance(result, dict):
        if "score" not in result:
            names = ", ".join(sorted(str(name)[:_MAX_NAME_LENGTH] for name in list(result)[:10]))
            raise BadResult(f'the dictionary has no "score"; it has {names or "nothing"}')
        if len(result) > _MAX_PARTS:
            raise BadResult(f"the dictionary has {len(result)} entries; at most {_MAX_PARTS}")
        parts = {name: value for name, value in result.items() if not _is_answer(name, value)}
        return {_part_name(name): _finite(value, f'"{name}" is ') for name, value in parts.items()}
    return {"score": _finite(result, "the result is ")}


def answer_of(result: Any) -> str | None:
    """Return the text under `answer` in what a reward function returned: its beginning, where it is very long.

    It is empty where the function says that it found none, and None where it speaks of no answer.
    """
    if not isinstance(result, dict) or "answer" not in result or not _is_answer("answer", result["answer"]):
        return None
    return (result["answer"] or "")[:MAX_ANSWER_LENGTH]


def _is_answer(name: Any, value: Any) -> bool:
    return bool(name == "answer") and (value is None or isinstance(value, str))


def _part_name(name: Any) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME_LENGTH or not name.isprintable():
        raise BadResult(f"{name!r:.100} names a part; names are text of 1 to {_MAX_NAME_LENGTH} printable characters")
    return name


def _finite(value: Any, subject: str) -> float:
    if inspect.iscoroutine(value):
        value.close()  # or Python complains that nobody awaited it
        raise BadResult(f"{subject}a coroutine; is an `await` missing?")
    if value is None:
        raise BadResult(f"{subject}None; is a `return` missing?")
    if not isinstance(value, numbers.Real):
        size = f" of length {len(value)}" if isinstance(value, str | bytes | list | tuple | set | dict) else ""
        raise BadResult(f"{subject}of type {type(value).__name__}{size}, not a number")
    try:
        number = float(value)
    except OverflowError:
        raise BadResult(f"{subject}a whole number too large for a float") from None
    if not math.isfinite(number):
        raise BadResult(f"{subject}{number}, not a finite number")
    return number


def failure_reply(kind: FailureKind, detail: str, seconds: float) -> dict[str, Any]:
    """Return a failure as it travels, not longer than a reply may be."""
    clipped = detail if len(detail) <= _MAX_DETAIL_LENGTH else f"{detail[:_MAX_DETAIL_LENGTH]} ..."
    return {"failure": kind, "detail": clipped, "seconds": seconds}


def read_again(body: bytes) -> str:
    """Return why a sample that has not failed itself is to be tried again; empty where it has an outcome."""
    return str(json.loads(body)["again"]) if body.startswith(b'{"again":') else ""


def read_reply(body: bytes, attempts: int, num_samples: int = 1) -> list[Outcome]:
    """Return the outcome of each sample; a reward function may have written the reply, so it is checked like a result.

    What has failed has failed for each sample.
    """
    try:
        reply = json.loads(body)
        if "failure" in reply:
            return [read_failure(reply, attempts)] * num_samples
        if len(reply["scores"]) != num_samples:
            raise ValueError(f"{len(reply['scores'])} scores of {num_samples} samples")
        return [_read_score(score, float(reply["seconds"])) for score in reply["scores"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return [Failure("crashed", f"its answer cannot be read: {error!r:.200}", 0.0, attempts)] * num_samples


def read_failure(reply: Mapping[str, Any], attempts: int) -> Failure:
    """Return what `failure_reply` wrote, or raise `ValueError` or the like where something else did."""
    if reply["failure"] not in FAILURE_KINDS:
        raise ValueError(f"unknown failure {reply['failure']!r:.100}")
    return Failure(reply["failure"], str(reply["detail"]), float(reply["seconds"]), attempts)


def _read_score(score: Any, seconds: float) -> Score:
    parts = {str(name): _finite(number, "a part is ") for name, number in score["parts"].items()}
    return Score(_finite(score["value"], "the score is "), parts, seconds, answer_of(score))


def sum_of(outcomes: Sequence[Outcome], max_abs_score: float | None = None) -> Outcome:
    """Return what the outcomes of a sample come to: the first failure, or the sum of the scores, if it may be that."""
    for outcome in outcomes:
        if isinstance(outcome, Failure):
            return outcome
    scores = [outcome for outcome in outcomes if isinstance(outcome, Score)]
    seconds = max((score.seconds for score in scores), default=0.0)
    value = sum(score.value for score in scores)
    if not math.isfinite(value):
        return Failure("bad_result", "the weighted sum is not a finite number", seconds)
    if max_abs_score is not None and abs(value) > max_abs_score:
        what = f"the score {value:g} is farther from 0 than reward.max_abs_score={max_abs_score:g}"
        return Failure("bad_result", what, seconds)
    answers = [score.answer for score in scores if score.answer is not None]
    answer = next(filter(None, answers), answers[0] if answers else None)
    return Score(value, {name: part for score in scores for name, part in score.parts.items()}, seconds, answer)


def reward_metrics(samples: Sequence[Sample], outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Return `reward/score/mean` and the like, the same as `reward/<data source>/...`, and the failures by kind.

    Failed samples are counted, and in no mean; where nothing was scored there is no mean.
    """
    by_source: dict[str, list[Outcome]] = defaultdict(list)
    for sample, outcome in zip(samples, outcomes, strict=True):
        by_source[sample.data_source].append(outcome)
    metrics = _figures("reward", outcomes)
    for source, of_source in by_source.items():
        metrics |= _figures(f"reward/{source}", of_source)
    for kind in FAILURE_KINDS:
        failed = [outcome for outcome in outcomes if isinstance(outcome, Failure) and outcome.kind == kind]
        metrics[f"reward/failed/{kind}"] = len(failed)
    metrics["reward/seconds/max"] = max((outcome.seconds for outcome in outcomes), default=0.0)
    return metrics


def _figures(prefix: str, outcomes: Sequence[Outcome]) -> dict[str, float]:
    scores = [outcome for outcome in outcomes if isinstance(outcome, Score)]
    figures: dict[str, float] = {
        f"{prefix}/num_samples": len(outcomes),
        f"{prefix}/failed_share": (len(outcomes) - len(scores)) / len(outcomes) if outcomes else 0.0,
    }
    columns: dict[str, list[float]] = defaultdict(list)
    for score in scores:
        for name, value in (({"score": score.value} if score.parts else {}) | score.parts).items():
            columns[name].append(value)
    for name, values in columns.items():
        figures[f"{prefix}/{name}/mean"] = sum(values) / len(values)
        figures[f"{prefix}/{name}/min"] = min(values)
        figures[f"{prefix}/{name}/max"] = max(values)
    return figures
