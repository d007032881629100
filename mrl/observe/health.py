"""What may be wrong with a run, each finding with the figures that say so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Lines = Sequence[dict[str, Any]]
_RECENT = 10


@dataclass(frozen=True)
class HealthFinding:
    """A suspicion and its evidence."""

    title: str
    evidence: str


def findings(lines: Lines) -> list[HealthFinding]:
    """Everything that looks unhealthy over the last steps, compared with the first."""
    return [found for rule in _RULES if (found := rule(lines)) is not None]


def _mean(lines: Lines, name: str) -> float | None:
    values = [line[name] for line in lines if line.get(name) is not None]
    return sum(values) / len(values) if values else None


def _above(name: str, limit: float, title: str, why: str) -> Callable[[Lines], HealthFinding | None]:
    def rule(lines: Lines) -> HealthFinding | None:
        recent = _mean(lines[-_RECENT:], name)
        if recent is None or recent <= limit:
            return None
        steps = f"steps {lines[-_RECENT:][0]['step']} to {lines[-1]['step']}"
        return HealthFinding(title, f"{name} is {recent:.3g} on average over {steps}, above {limit:g}: {why}")

    return rule


def _entropy_collapse(lines: Lines) -> HealthFinding | None:
    first, recent = _mean(lines[:_RECENT], "actor/entropy_mean"), _mean(lines[-_RECENT:], "actor/entropy_mean")
    if first is None or recent is None or recent > 0.1 * first:
        return None
    what = f"actor/entropy_mean fell from {first:.3g} to {recent:.3g}"
    return HealthFinding("Entropy has collapsed", f"{what}: the samples of a prompt hardly differ now")


def _mismatch_rising(lines: Lines) -> HealthFinding | None:
    name = "mismatch/log_prob_abs_diff_mean"
    first, recent = _mean(lines[:_RECENT], name), _mean(lines[-_RECENT:], name)
    if first is None or recent is None or recent < 1e-4 or recent < 3 * first:
        return None
    what = f"{name} rose from {first:.2e} to {recent:.2e}"
    return HealthFinding("Engines and trainer drift apart", f"{what}: look at dtypes, or set algorithm.correction")


def _skipped_updates(lines: Lines) -> HealthFinding | None:
    skipped = sum(line.get("actor/skipped") or 0 for line in lines)
    if not skipped:
        return None
    return HealthFinding("Updates were skipped", f"{skipped:g} optimizer steps had gradients that were not finite")


_RULES = (
    _above("groups/uniform_share", 0.6, "Most prompts teach nothing", "all samples of such a prompt score the same"),
    _above("response_length/clip_ratio", 0.2, "Responses are cut off", "raise rollout.max_response_tokens"),
    _above("actor/pg_clipfrac", 0.3, "Updates are too large", "lower the learning rate"),
    _above("reward/failed_share", 0.01, "Rewards fail", "events.jsonl names each sample and its reason"),
    _entropy_collapse,
    _mismatch_rising,
    _skipped_updates,
)
