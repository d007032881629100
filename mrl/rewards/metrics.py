"""The figures of a scored batch, for all of it and per data source."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from mrl.rewards.outcome import FAILURE_KINDS, Failure, Outcome, Score
from mrl.rewards.sample import Sample


def reward_metrics(samples: Sequence[Sample], outcomes: Sequence[Outcome]) -> dict[str, float]:
    """`reward/score/mean` and the like, the same as `reward/<data source>/...`, and the failures by kind.

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
    for name, values in _columns(scores).items():
        figures[f"{prefix}/{name}/mean"] = sum(values) / len(values)
        figures[f"{prefix}/{name}/min"] = min(values)
        figures[f"{prefix}/{name}/max"] = max(values)
    return figures


def _columns(scores: Sequence[Score]) -> Mapping[str, list[float]]:
    columns: dict[str, list[float]] = defaultdict(list)
    for score in scores:
        columns["score"].append(score.value)
        for name, value in score.parts.items():
            columns[name].append(value)
    return columns
