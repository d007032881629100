"""Sampling masks: the tokens that top-k and top-p left to draw each token from, as engines return them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mrl.config.algorithm import NUM_TIES
from mrl.errors import RolloutError
from mrl.rollout.requests import Mask


def mask_of(
    key: str, token_ids: npt.NDArray[np.int32], ids_TM: Mask, log_probs_TM: npt.NDArray[np.float32], vocab: int
) -> Mask:
    """Return the mask of a sample. For each token, the likeliest tokens are given, with -inf for those not left."""
    is_left_TM = log_probs_TM > -np.inf
    width = ids_TM.shape[1]
    if width < vocab and len(full := np.flatnonzero(is_left_TM.all(1))):
        what = (
            f"token {full[0]} was drawn from at least {width} tokens: more than {NUM_TIES - 1} tie for the last place"
        )
        raise RolloutError(what, where=key, fix="change rollout.top_k, or set algorithm.keep_sampling_mask=false")
    mask_TM = np.where(is_left_TM, ids_TM, -1).astype(np.int32)
    if len(missing := np.flatnonzero(~(mask_TM == token_ids[:, None]).any(1))):
        at = missing[0]
        left = mask_TM[at][mask_TM[at] >= 0].tolist()
        raise RolloutError(f"token {at}, {token_ids[at]}, is not among those it was drawn from: {left}", where=key)
    return mask_TM
