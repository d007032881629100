"""The sections `sync` and `asynchrony`: when and how the weights of the trainer get into the engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mrl.config.bounds import Count, NotNegative, Share


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """How weights travel from the trainer into the engines, and how it is known that they arrived."""

    offload: bool = True
    """Whether the trainer's memory is on the host while the engines generate, and the engines give theirs back while
    it trains; false where both fit on the devices at once, as on a laptop without GPUs."""
    bucket_bytes: Count = 256 << 20
    """What travels at once; twice this is the extra memory."""
    probe_every: NotNegative = 10
    """Steps between comparisons of each engine's log-probs of a fixed prompt with the trainer's; one that has just
    started is always compared, and so is the mean over all samples of a step. 0 never compares any."""
    probe_tolerance: Share = 0.02
    """Largest mean difference of log-probs at the same weights; more stops the run."""


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
    replay: str | None = None
    """The directory of a run with weights in flight, which this one repeats to the bit: each engine is asked the same
    before the same of its steps. `mrl train --replay RUN` sets it."""
