"""Everything that looks unhealthy in the metrics of a run, with its evidence."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Lines = Sequence[Mapping[str, Any]]
"""Lines of a run's `metrics.jsonl`."""

_RECENT = 10
OVER_OPTIMIZED = "The reward model is over-optimized"


@dataclass(frozen=True)
class HealthFinding:
    title: str
    evidence: str


def findings(lines: Lines) -> list[HealthFinding]:
    """Return everything that looks unhealthy in the last steps, compared with the first steps or with earlier
    validations.

    Line 0 is a validation before the first step, if there was one.
    """
    steps = [line for line in lines if line["step"] > 0]
    results = [rule(steps) for rule in _RULES] + [_over_optimized(lines)]
    return [finding for finding in results if finding is not None]


def _mean(lines: Lines, name: str) -> float | None:
    values = [line[name] for line in lines if line.get(name) is not None]
    return sum(values) / len(values) if values else None


def _above(name: str, limit: float, title: str, reason: str) -> Callable[[Lines], HealthFinding | None]:
    def rule(lines: Lines) -> HealthFinding | None:
        recent = _mean(lines[-_RECENT:], name)
        if recent is None or recent <= limit:
            return None
        steps = f"steps {lines[-_RECENT:][0]['step']} to {lines[-1]['step']}"
        return HealthFinding(title, f"{name} is {recent:.3g} on average over {steps}, above {limit:g}: {reason}")

    return rule


def _entropy_collapse(lines: Lines) -> HealthFinding | None:
    first, recent = _mean(lines[:_RECENT], "actor/entropy_mean"), _mean(lines[-_RECENT:], "actor/entropy_mean")
    if first is None or recent is None or recent > 0.1 * first:
        return None
    evidence = f"actor/entropy_mean fell from {first:.3g} to {recent:.3g}"
    return HealthFinding("Entropy has collapsed", f"{evidence}: the samples of a prompt are almost equal")


def _mismatch_rising(lines: Lines) -> HealthFinding | None:
    name = "mismatch/log_prob_abs_diff_mean"
    first, recent = _mean(lines[:_RECENT], name), _mean(lines[-_RECENT:], name)
    if first is None or recent is None or recent < 1e-4 or recent < 3 * first:
        return None
    evidence = f"{name} rose from {first:.2e} to {recent:.2e}"
    return HealthFinding("Engines and trainer drift apart", f"{evidence}: check dtypes, or set algorithm.correction")


def _skipped_updates(lines: Lines) -> HealthFinding | None:
    skipped = sum(line.get("actor/skipped") or 0 for line in lines)
    if not skipped:
        return None
    return HealthFinding("Updates were skipped", f"{skipped:g} optimizer steps had gradients that were not finite")


def _over_optimized(lines: Lines) -> HealthFinding | None:
    """Find reward models that score the policy higher than before, while its validation by rule has become worse.

    The drop is measured from the best validation, and must exceed two standard errors of a difference of two shares.
    """
    rule = next((key for line in lines for key in line if re.fullmatch(r"val/solved/mean@\d+", key)), "")
    measured = [line for line in lines if line.get(rule) is not None and line.get("val/prompts")]
    if not measured:
        return None
    best, last = max(measured, key=lambda line: float(line[rule])), measured[-1]
    before, after, num = best[rule], last[rule], int(rule.partition("@")[2]) * last["val/prompts"]
    error = max(1 / num, math.sqrt((before * (1 - before) + after * (1 - after)) / num))
    models = [key for key in last if re.fullmatch(r"val/(?!score/|solved/)[^/]+/mean@\d+", key) and key in best]
    risen = [key for key in models if last[key] > best[key]]
    if not risen or before - after <= 2 * error:
        return None
    evidence = f"{risen[0]} rose from {best[risen[0]]:.3g} to {last[risen[0]]:.3g} between steps {best['step']} and "
    evidence += (
        f"{last['step']}, while {rule} fell from {before:.3g} to {after:.3g}, by {(before - after) / error:.1f} "
    )
    evidence += f"standard errors: step {best['step']} was better (validation.keep_best); "
    fix = "algorithm.kl.where=reward limits this, and more preference pairs of the policy's answers correct the model"
    return HealthFinding(OVER_OPTIMIZED, evidence + fix)


_RULES = (
    _above("groups/uniform_share", 0.6, "Most prompts teach nothing", "all samples of such a prompt score the same"),
    _above("response_length/clip_ratio", 0.2, "Responses are cut off", "raise rollout.max_response_tokens"),
    _above("actor/pg_clipfrac", 0.3, "Updates are too large", "lower the learning rate"),
    _above("reward/failed_share", 0.01, "Rewards fail", "events.jsonl names each sample and its reason"),
    _entropy_collapse,
    _mismatch_rising,
    _skipped_updates,
)
