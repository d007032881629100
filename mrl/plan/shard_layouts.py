"""Layouts of a role that torch shards (`strategy: fsdp`), for a search."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mrl.config.arithmetic import longest_sample_tokens, samples_per_step
from mrl.plan.plan_input import PlanInput

_CONTEXT_SIZES = (1, 2, 4, 8)
_BUDGETS = (1, 2, 4)
"""Multiples of `max_tokens_per_device`: every micro-batch gathers all weights, so larger ones need less time."""
_NODES = (1, 2, 4)
"""Nodes that share one copy of the model, if not all do."""


def shard_layouts(placed: PlanInput, role: str, devices: int) -> Iterator[dict[str, Any]]:
    """Yield copies, context ranks and micro-batches of a role on its pool, with and without recomputation."""
    config, model = placed.config, placed.config.model_roles()[role]
    here, longest = config.cluster.devices_per_node, longest_sample_tokens(config.rollout)
    is_trained = role in config.trained_roles()
    sizes = [nodes * here for nodes in _NODES if devices % (nodes * here) == 0 and nodes * here < devices]
    for budget in (model.max_tokens_per_device * multiple for multiple in _BUDGETS):
        # Context parallelism costs more than it gains if a sample fits without it.
        cp = next((size for size in _CONTEXT_SIZES if longest <= budget * size), _CONTEXT_SIZES[-1])
        if devices % cp or samples_per_step(config.batch) % (dp := devices // cp):
            continue
        if is_trained and config.batch.samples_per_update % dp:
            continue
        for shard_size in (None, *sizes):
            layout = {
                f"{role}.parallel.cp": cp,
                f"{role}.max_tokens_per_device": budget,
                f"{role}.fsdp.shard_size": shard_size,
            }
            for recompute in (False, True) if is_trained else (model.fsdp.recompute,):
                yield layout | {f"{role}.fsdp.recompute": recompute}
