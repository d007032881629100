"""Identities that hold in every right run, checked while it runs: each that breaks stops the run and is named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mrl.config.schema import Config
from mrl.errors import AuditFailed

SAME_POLICY = {"float32": 1e-4, "bfloat16": 2e-2}
"""How far mean log-prob differences of one policy may be from 0: packing and kernels differ between passes."""


def check_invariants(
    config: Config, step: int, metrics: Mapping[str, float], updates: Sequence[Mapping[str, float]], num_tokens: int
) -> None:
    """Check what must hold after a step."""
    tolerance = SAME_POLICY[config.actor.dtype]
    if updates:
        # The first update meets the policy that made the old log-probs.
        _check(step, "the loss reports ppo_kl, the mean log-ratio", "ppo_kl" in updates[0], ", ".join(updates[0]))
        moved = abs(updates[0]["ppo_kl"])
        _check(step, "the ratio is 1 in the first update", moved <= tolerance, f"mean log-ratio {moved:.3g}")
        clipped = updates[0].get("pg_clipfrac", 0.0)
        _check(step, "nothing is clipped in the first update", clipped <= tolerance, f"{100 * clipped:.3g} % clipped")
        seen, wanted = round(sum(update["tokens"] for update in updates)), num_tokens * config.batch.epochs_per_step
        _check(step, "every response token is learned from once", seen == wanted, f"{seen} of {wanted}")
        # An estimate at sampled tokens may be below 0; only a divergence has a mass.
        apart = min((update["distill_loss"] for update in updates if "teacher_mass" in update), default=0.0)
        _check(step, "no divergence from the teacher is below 0", apart >= -tolerance, f"it is {apart:.3g}")
    if step == 1 and "reward/kl" in metrics:
        kl = abs(metrics["reward/kl"])
        _check(step, "the KL to the reference is 0 before training", kl <= tolerance, f"it is {kl:.3g}")
    _check_engines(config, step, metrics)


def _check_engines(config: Config, step: int, metrics: Mapping[str, float]) -> None:
    difference = metrics.get("mismatch/log_prob_abs_diff_mean", metrics.get("actor/rollout_diff"))
    if not config.sync.probe_every or difference is None or config.rollout.top_p < 1 or config.rollout.top_k:
        return
    if metrics.get("async/staleness/max", 0.0) > 0:
        return  # the policy has moved since: engines are compared by `EngineProbe`, at the weights that they hold
    what = f"the mean difference of log-probs is {difference:.3g}; sync.probe_tolerance={config.sync.probe_tolerance:g}"
    _check(step, "the engines sample from the trainer's weights", difference <= config.sync.probe_tolerance, what)


def _check(step: int, identity: str, holds: bool, found: str) -> None:
    if not holds:
        raise AuditFailed(
            f"step {step}: it does not hold that {identity}: {found}",
            fix="this is a defect of mrl or of its settings, not of the model: results would not mean what they say",
        )
