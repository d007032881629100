"""Log-probs of the old policy, from which a policy loss measures its ratio, without a forward pass of the trainer."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from mrl.algos.rollout_correction import RolloutPair
from mrl.algos.rows import apply_mask
from mrl.errors import BatchError


def approximate_old_log_probs(
    source: Literal["engine", "interpolated"], pair: RolloutPair, ages_T: Tensor | None = None
) -> Tensor:
    """Return log pi_old as a constant, 0 on masked tokens. `pair` has the current policy and the engine's.

    `engine`: log pi_engine. `interpolated` (A-3PO, arXiv 2512.06547): 1/d log pi_engine + (1 - 1/d) log pi for a token
    whose weights are d >= 1 steps old, and log pi for d = 0.
    """
    engine_T = apply_mask(pair.rollout_log_probs_T.detach(), pair.mask_T)
    if source == "engine":
        return engine_T
    if ages_T is None:
        raise BatchError("interpolated old log-probs need the column `staleness`, which is missing")
    if num_unknown := int((apply_mask(ages_T, pair.mask_T) < 0).sum()):
        raise BatchError(f"the weights that drew {num_unknown} of {int(pair.mask_T.sum())} tokens are unknown")
    share_T = (1 / ages_T.clamp(min=1).to(engine_T.dtype)) * (ages_T >= 1)
    return apply_mask(share_T * engine_T + (1 - share_T) * pair.log_probs_T.detach(), pair.mask_T)
