"""Outcome of a sample: a score, or a failure with its kind, never an invented 0; and the metrics of a batch."""

from __future__ import annotations

import inspect
import json
import math
import numbers
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mrl.config.reward import RewardConfig
from mrl.rewards.sample import Sample

FailureKind = Literal["timeout", "crashed", "raised", "bad_result", "memory"]
FAILURE_KINDS: tuple[FailureKind, ...] = ("timeout", "crashed", "raised", "bad_result", "memory")
_MAX_DETAIL_LENGTH = 2000
_MAX_NAME_LENGTH = 100
_MAX_PARTS = 100
MAX_ANSWER_LENGTH = 1000


@dataclass(frozen=True)
class Score:
    """The weighted sum, and its parts: function (or `function/part`) -> number.

    Without parts, no function scores the sample's data source, and its score comes only from reward models.
    """

    value: float
    parts: dict[str, float]
    seconds: float
    answer: str | None = None
    """Answer that a function judged, empty if it found none. None if no function reports an answer."""


@dataclass(frozen=True)
class Failure:
    """A sample without a score: the kind of failure, and the details."""

    kind: FailureKind
    detail: str
    seconds: float
    attempts: int = 1


Outcome = Score | Failure
REWARD = "reward/"
"""Beginning of the names of columns with the score of one reward function."""


def reward_columns(config: RewardConfig, parts: Sequence[Mapping[str, float]]) -> Iterator[tuple[str, list[float]]]:
    """Yield name and values of a column for each function with a weight, from the parts of each sample's score.

    A function that does not score the data source of a prompt has 0 for all of its samples.
    """
    for label, function in config.functions.items():
        if function.weight:
            yield f"{REWARD}{label}", [float(of_sample.get(label, 0.0)) for of_sample in parts]


class BadResult(ValueError):
    """Invalid result of a reward function or an environment."""


def numbers_of(result: Any) -> dict[str, float]:
    """Return the numbers in the result of a reward function, including `score`."""
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
    """Return the text under `answer` in the result of a reward function, shortened if it is very long.

    It is empty if the function reports that it found none, and None if the function reports no answer.
    """
    if not isinstance(result, dict) or "answer" not in result or not _is_answer("answer", result["answer"]):
        return None
    return (result["answer"] or "")[:MAX_ANSWER_LENGTH]


def _is_answer(name: Any, value: Any) -> bool:
    return bool(name == "answer") and (value is None or isinstance(value, str))


def _part_name(name: Any) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME_LENGTH or not name.isprintable():
        raise BadResult(
            f"{name!r:.100} is the name of a part; names must be text of 1 to {_MAX_NAME_LENGTH} printable characters"
        )
    return name


def _finite(value: Any, subject: str) -> float:
    if inspect.iscoroutine(value):
        value.close()  # otherwise Python warns that it was never awaited
        raise BadResult(f"{subject}a coroutine; an `await` may be missing")
    if value is None:
        raise BadResult(f"{subject}None; a `return` may be missing")
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
    """Return a failure in the form sent to the run, shortened to the limit of a reply."""
    clipped = detail if len(detail) <= _MAX_DETAIL_LENGTH else f"{detail[:_MAX_DETAIL_LENGTH]} ..."
    return {"failure": kind, "detail": clipped, "seconds": seconds}


def read_again(body: bytes) -> str:
    """Return why a sample that did not fail itself should be retried. Return an empty string if it has an outcome."""
    return str(json.loads(body)["again"]) if body.startswith(b'{"again":') else ""


def read_reply(body: bytes, attempts: int, num_samples: int = 1) -> list[Outcome]:
    """Return the outcome of each sample. A reward function may have written the reply, so it is checked like a result.

    A failure applies to each sample of the group.
    """
    try:
        reply = json.loads(body)
        if "failure" in reply:
            return [read_failure(reply, attempts)] * num_samples
        if len(reply["scores"]) != num_samples:
            raise ValueError(f"{len(reply['scores'])} scores of {num_samples} samples")
        return [_read_score(score, float(reply["seconds"])) for score in reply["scores"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return [
            Failure("crashed", f"the reply of its worker cannot be read: {error!r:.200}", 0.0, attempts)
        ] * num_samples


def read_failure(reply: Mapping[str, Any], attempts: int) -> Failure:
    """Return the failure written by `failure_reply`. Raise `ValueError` or similar for anything else."""
    if reply["failure"] not in FAILURE_KINDS:
        raise ValueError(f"unknown failure {reply['failure']!r:.100}")
    return Failure(reply["failure"], str(reply["detail"]), float(reply["seconds"]), attempts)


def _read_score(score: Any, seconds: float) -> Score:
    parts = {str(name): _finite(number, "a part is ") for name, number in score["parts"].items()}
    return Score(_finite(score["value"], "the score is "), parts, seconds, answer_of(score))


def sum_of(outcomes: Sequence[Outcome], max_abs_score: float | None = None) -> Outcome:
    """Return the combined outcome of a sample: the first failure, or the sum of the scores if it is within the
    limits."""
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
    """Return `reward/score/mean` and similar metrics, the same for `reward/<data source>/...`, and the failures by
    kind.

    Failed samples are counted, but excluded from means. Without scored samples there is no mean.
    """
    by_source: dict[str, list[Outcome]] = defaultdict(list)
    for sample, outcome in zip(samples, outcomes, strict=True):
        by_source[sample.data_source].append(outcome)
    metrics = _figures("reward", outcomes)
    for source, source_outcomes in by_source.items():
        metrics |= _figures(f"reward/{source}", source_outcomes)
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
