"""Stand-ins of a rehearsal for a model that torch shards: kernels of GPUs, and comparisons of floats.

Sharding itself is torch's own code: `fully_shard` gathers, frees and reduces tensors without memory.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mrl.engine.packed_attention import Qkv, in_blocks
from mrl.engine.segments import Segments
from mrl.fsdp import attention, probe
from mrl.fsdp.engine import FsdpEngine
from mrl.fsdp.probe import ProbeLimits
from mrl.rehearse.kernels import attended
from mrl.rehearse.stand_ins import Replaced, head_kernels, host_answers

_ANY = ProbeLimits(math.inf, math.inf)


def sharded_kernels() -> Replaced:
    """Return kernels of GPUs for an `FsdpEngine`."""
    return [
        *head_kernels(),
        (attention, "in_blocks", _attend),
        (torch.optim, "AdamW", partial(torch.optim.AdamW, foreach=True)),  # torch's choice on GPUs
    ]


def sharded_answers() -> Replaced:
    """Return what depends on contents: differences of floats are not known, but both sides of the comparison run."""
    return [*host_answers(), (probe, "LIMITS", dict.fromkeys(probe.LIMITS, _ANY))]


def _attend(
    qkv: Qkv, segments: Segments, scale: float | None, reach: int | None, sinks: Tensor | None = None
) -> Tensor:
    """Attend as a GPU does: by the kernel for packed rows, unless it cannot compute such attention."""
    query, key, value = qkv
    if sinks is not None or query.dtype == torch.float32 or value.shape[-1] > key.shape[-1]:
        return in_blocks(qkv, segments, scale, reach, sinks)
    return attended(query, key, value, None)


def num_held(engine: FsdpEngine) -> int:
    """Return the number of elements of a rank's shards."""
    return sum(cast(DTensor, cast(Any, parameter)).to_local().numel() for parameter in engine.model.parameters())
