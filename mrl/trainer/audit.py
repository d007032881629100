"""Invariants of a correct run, checked at each step. A violation stops the run with its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from mrl.config.schema import Config
from mrl.errors import AuditFailed
from mrl.observe.metrics import as_written, read_metrics, without_clock
from mrl.protocol import DataProto
from mrl.protocol.columns import Jagged

SAME_POLICY = {"float32": 1e-4, "bfloat16": 2e-2}
"""Largest mean log-prob difference within one policy: passes differ in packing and kernels."""


def check_invariants(
    config: Config, step: int, metrics: Mapping[str, float], updates: Sequence[Mapping[str, float]], num_tokens: int
) -> None:
    tolerance = SAME_POLICY[config.actor.dtype]
    if updates:
        _check(step, "the loss reports ppo_kl, the mean log-ratio", "ppo_kl" in updates[0], ", ".join(updates[0]))
        if config.algorithm.old_log_probs == "trainer":
            _check_first_update(config, step, updates[0])
        num_seen, num_expected = (
            round(sum(update["tokens"] for update in updates)),
            num_tokens * config.batch.epochs_per_step,
        )
        _check(
            step,
            "every response token is used once per epoch",
            num_seen == num_expected,
            f"{num_seen} of {num_expected}",
        )
        # Estimates from sampled tokens may be negative. Only full divergences have `teacher_mass`.
        lowest_loss = min((update["distill_loss"] for update in updates if "teacher_mass" in update), default=0.0)
        _check(
            step, "no divergence from the teacher is negative", lowest_loss >= -tolerance, f"it is {lowest_loss:.3g}"
        )
    is_other = config.reference is not None and config.reference.path is not None
    if step == 1 and "reward/kl" in metrics and not is_other:
        kl = abs(metrics["reward/kl"])
        _check(step, "the KL to the reference is 0 before training", kl <= tolerance, f"it is {kl:.3g}")


def _check_first_update(config: Config, step: int, update: Mapping[str, float]) -> None:
    """Check that the first update uses the policy that computed the old log-probs."""
    tolerance, loss = SAME_POLICY[config.actor.dtype], config.algorithm.loss
    log_ratio, clipped = abs(update["ppo_kl"]), update.get("pg_clipfrac", 0.0)
    _check(step, "the ratio is 1 in the first update", log_ratio <= tolerance, f"mean log-ratio {log_ratio:.3g}")
    # If the clip range is below rounding (GSPO's 3e-4 in bfloat16), rounding alone is clipped.
    holds = clipped <= tolerance or (min(loss.clip_low, loss.clip_high) < tolerance and clipped <= 1)
    _check(step, "nothing is clipped in the first update", holds, f"{100 * clipped:.3g} % clipped")


def _check(step: int, identity: str, holds: bool, measured: str) -> None:
    if not holds:
        raise AuditFailed(
            f"step {step}: the invariant does not hold: {identity} ({measured})",
            fix="this is a bug in mrl or in its settings, not in the model; the results of this run are not valid",
        )


NOBODY = -(1 << 31)
"""Age of tokens that were not drawn from any weights."""


def with_staleness(batch: DataProto, version: int) -> DataProto:
    """Return the rows with the age of each token's weights, if the versions are known."""
    if "versions" not in batch.columns():
        return batch
    drawn = batch.values("versions")
    ages = torch.where(drawn < 0, NOBODY, version - drawn)
    return batch.with_column("staleness", Jagged(ages, batch.lengths("responses")))


def staleness_metrics(batch: DataProto, ahead: int) -> dict[str, float]:
    """Return metrics of the ages. Raise an error if an age exceeds `ahead`."""
    if "staleness" not in batch.columns():
        return {}
    ages = batch.values("staleness").numpy()
    ages_by_row = np.split(ages, np.cumsum(batch.lengths("responses"))[:-1])
    drawn = ages[ages != NOBODY]
    if drawn.min() < 0 or drawn.max() > ahead:
        problem = f"tokens are {drawn.min()} to {drawn.max()} updates old, and asynchrony.ahead is {ahead}"
        raise AuditFailed(problem, fix="this is a bug in mrl: the samples have the wrong weight versions")
    return {
        "async/staleness/mean": float(drawn.mean()),
        "async/staleness/max": float(drawn.max()),
        "async/versions_per_sample": float(np.mean([len(np.unique(row[row != NOBODY])) for row in ages_by_row])),
    } | {f"async/staleness/share_{age}": float((drawn == age).mean()) for age in range(ahead + 1)}


class ReplayedRun:
    """Metrics of a finished run, from its `metrics.jsonl`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lines = {line["step"]: without_clock(line) for line in read_metrics(directory / "metrics.jsonl")}
        self.num_steps = max(self._lines, default=0)

    def compare(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raise an error if the metrics differ from that run's in any bit. Steps that it has not done are skipped."""
        if (expected := self._lines.get(step)) is None:
            return
        measured = without_clock(as_written(step, metrics))
        names = [name for name in {**expected, **measured} if expected.get(name) != measured.get(name)]
        if names:
            first = names[0]
            raise AuditFailed(
                f"step {step} of the replay differs from the run: {len(names)} of {len(expected)} figures differ, "
                f"the first is {first}: {measured.get(first)} instead of {expected.get(first)}",
                where=str(self.directory),
                fix="use the run's model, data, configuration and machine; GPUs do not guarantee identical results",
            )
