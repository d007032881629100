"""Settings of models that torch shards (`strategy: fsdp`)."""

from __future__ import annotations

from dataclasses import dataclass

from mrl.config.bounds import Count

OPTIMIZER_DEFAULTS = {"weight_decay": 0.01, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-8, "clip_grad": 1.0}
"""Keys of `ROLE.optimizer` next to `lr`, with the defaults of Megatron."""


@dataclass(frozen=True, kw_only=True)
class FsdpConfig:
    """How torch shards a model with `strategy: fsdp`."""

    shard_size: Count | None = None
    """Ranks that share one copy of the model, next to each other. Null shares one copy among all ranks. The devices of
    a node keep gathers inside the node, and need the memory of a copy on each node."""
    recompute: bool = False
    """Compute each layer again in the backward pass, so that only the inputs of layers are kept."""
