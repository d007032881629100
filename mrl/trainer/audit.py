"""Identities that hold in every right run, checked while it runs: each that breaks stops the run and is named."""

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
"""How far mean log-prob differences of one policy may be from 0: packing and kernels differ between passes."""


def check_invariants(
    config: Config, step: int, metrics: Mapping[str, float], updates: Sequence[Mapping[str, float]], num_tokens: int
) -> None:
    tolerance = SAME_POLICY[config.actor.dtype]
    if updates:
        # The first update meets the policy that made the old log-probs.
        _check(step, "the loss reports ppo_kl, the mean log-ratio", "ppo_kl" in updates[0], ", ".join(updates[0]))
        moved = abs(updates[0]["ppo_kl"])
        _check(step, "the ratio is 1 in the first update", moved <= tolerance, f"mean log-ratio {moved:.3g}")
        clipped = updates[0].get("pg_clipfrac", 0.0)
        loss = config.algorithm.loss
        # A clip as narrow as rounding, as GSPO's 3e-4 in bfloat16, clips what rounding alone moves.
        holds = clipped <= tolerance or (min(loss.clip_low, loss.clip_high) < tolerance and clipped <= 1)
        _check(step, "nothing is clipped in the first update", holds, f"{100 * clipped:.3g} % clipped")
        seen, wanted = round(sum(update["tokens"] for update in updates)), num_tokens * config.batch.epochs_per_step
        _check(step, "every response token is learned from once", seen == wanted, f"{seen} of {wanted}")
        # An estimate at sampled tokens may be below 0; only a divergence has a mass.
        apart = min((update["distill_loss"] for update in updates if "teacher_mass" in update), default=0.0)
        _check(step, "no divergence from the teacher is below 0", apart >= -tolerance, f"it is {apart:.3g}")
    is_other = config.reference is not None and config.reference.path is not None
    if step == 1 and "reward/kl" in metrics and not is_other:
        kl = abs(metrics["reward/kl"])
        _check(step, "the KL to the reference is 0 before training", kl <= tolerance, f"it is {kl:.3g}")


def _check(step: int, identity: str, holds: bool, found: str) -> None:
    if not holds:
        raise AuditFailed(
            f"step {step}: it does not hold that {identity}: {found}",
            fix="this is a defect of mrl or of its settings, not of the model: results would not mean what they say",
        )


NOBODY = -(1 << 31)
"""The age of a token that no weights drew."""


def with_staleness(batch: DataProto, version: int) -> DataProto:
    """Return the rows with the age of each token's weights, where it is known what drew them."""
    if "versions" not in batch.columns():
        return batch
    drawn = batch.values("versions")
    ages = torch.where(drawn < 0, NOBODY, version - drawn)
    return batch.with_column("staleness", Jagged(ages, batch.lengths("responses")))


def staleness_metrics(batch: DataProto, ahead: int) -> dict[str, float]:
    """Return figures of the ages; one that is beyond what may be ahead stops the run."""
    if "staleness" not in batch.columns():
        return {}
    ages = batch.values("staleness").numpy()
    of_rows = np.split(ages, np.cumsum(batch.lengths("responses"))[:-1])
    written = ages[ages != NOBODY]
    if written.min() < 0 or written.max() > ahead:
        what = f"tokens are {written.min()} to {written.max()} updates old, and asynchrony.ahead is {ahead}"
        raise AuditFailed(what, fix="this is a defect of mrl: the samples are not those that they are taken for")
    return {
        "async/staleness/mean": float(written.mean()),
        "async/staleness/max": float(written.max()),
        "async/versions_per_sample": float(np.mean([len(np.unique(row[row != NOBODY])) for row in of_rows])),
    } | {f"async/staleness/share_{age}": float((written == age).mean()) for age in range(ahead + 1)}


class ReplayedRun:
    """What a run wrote into `metrics.jsonl`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lines = {line["step"]: without_clock(line) for line in read_metrics(directory / "metrics.jsonl")}
        self.num_steps = max(self._lines, default=0)

    def compare(self, step: int, metrics: Mapping[str, float]) -> None:
        """Stop where these figures are not those of the run, to the last bit; steps that it has not done are new."""
        if (expected := self._lines.get(step)) is None:
            return
        found = without_clock(as_written(step, metrics))
        names = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
        if names:
            first = names[0]
            raise AuditFailed(
                f"step {step} of the replay is another than the run's: {len(names)} of {len(expected)} figures differ, "
                f"the first {first}: {found.get(first)} instead of {expected.get(first)}",
                where=str(self.directory),
                fix="the model, the data, the configuration and the machine that the run had; GPUs do not promise it",
            )
