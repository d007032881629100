"""The `asynchrony` section: how far generation may be ahead of training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mrl.config.bounds import NotNegative


@dataclass(frozen=True, kw_only=True)
class AsynchronyConfig:
    """Whether batches are generated while others are trained, and by which weights."""

    ahead: NotNegative = 0
    """Batches that are generated ahead of the one that is trained, which is how many updates old the weights may be
    that drew a sample: 0 waits for each batch. More needs engines with devices of their own."""
    weights: Literal["between", "in_flight"] = "between"
    """When engines take new weights: `between` two batches, so that one version draws each of them whole; or
    `in_flight`, between two tokens of the samples that they have under way, so that no engine waits for the longest
    sample of a batch."""
    cache: Literal["recompute", "keep"] = "recompute"
    """What becomes of the keys and values of samples under way when weights come in flight: computed anew, or kept
    as the weights before made them."""
