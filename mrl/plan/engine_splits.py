"""The splits of an engine over devices that the search tries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mrl.errors import ModelError
from mrl.models.rollout_table import EngineSizes
from mrl.plan.plan_input import PlanInput

_NODES = 2, 4


def engine_splits(placed: PlanInput, sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield splits over tensor ranks, over stages of an engine on several nodes, and over data-parallel ranks. Skip the
    splits that the model or a rule forbids.

    Within a node, stages add room for the cache, but no speed.
    """
    config, spec = placed.config, placed.specs["actor"]
    devices = config.placement.pools[config.placement.roles.get("rollout", config.placement.roles["actor"])]
    nodes = [num_nodes * config.cluster.devices_per_node for num_nodes in _NODES]
    splits = [(tp, 1, 1) for tp in (*sizes, *nodes)]
    splits += [(tp, size // tp, 1) for size in nodes for tp in (*sizes, *nodes) if tp < size and size % tp == 0]
    splits += [(1, 1, dp) for dp in (*sizes, *nodes) if dp > 1]
    for tp, pp, dp in splits:
        one = {"rollout.tp": tp, "rollout.pp": 1, "rollout.dp": 1}
        split: dict[str, Any] = one | {"rollout.pp": pp, "rollout.dp": dp}
        split |= {"rollout.vllm.enable_expert_parallel": True} if dp > 1 else {}
        subject = placed.with_changes_unchecked(split)
        try:
            EngineSizes.of(subject.config.rollout, spec).check(spec)
        except ModelError:
            continue
        if devices % (tp * pp * dp) == 0 and (split == one or not _adds_problems(placed, one, split)):
            yield split


def _adds_problems(placed: PlanInput, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether the second change has problems that the first has not. The search replaces other sections later,
    so their present problems do not count."""
    known, found = ({*placed.with_changes_unchecked(changes).problems()} for changes in (one, other))
    return not found <= known
