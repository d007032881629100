"""What a run may do when machines are missing: the same models on those that are there."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.hardware import DEFAULT
from mrl.config.load import Resolved
from mrl.config.schema import Config
from mrl.errors import ModelError
from mrl.plan.advice import Changes
from mrl.plan.memory import gib
from mrl.plan.plan_input import PlanInput, make_plan_input
from mrl.plan.search import Result, search
from mrl.plan.timing import assumed_lengths


def fits_on(resolved: Resolved[Config], num_nodes: int) -> list[str]:
    """What to write instead where only so many machines are there."""
    cluster = resolved.config.cluster
    if not num_nodes:
        return ["No machine is there: nothing fits."]
    if cluster.device == "cpu":
        num_slots = num_nodes * cluster.devices_per_node
        return [f"cluster.nodes={num_nodes} has {num_slots} CPU slots for placement.pools; a search is about GPUs."]
    try:
        subject = make_plan_input(resolved, DEFAULT, None)
    except ModelError as error:
        return [f"What fits on {num_nodes} nodes is not known: {error.what}"]
    lengths, device = assumed_lengths(resolved.config), subject.hardware.name
    # Batches and layers are mostly divided by powers of two: five machines may do no better than four.
    for nodes in [num_nodes, *(2**power for power in reversed(range(num_nodes.bit_length())) if 2**power < num_nodes)]:
        result = search(subject.with_changes_unchecked({"cluster.nodes": nodes}), lengths, most=1)
        if result.found:
            head = f"On {nodes} node{'s' if nodes > 1 else ''} of {device} this fits (predicted):"
            return [head, *(f"  {line}" for line in found_lines(subject, {"cluster.nodes": nodes}, result))]
    return [f"No layout of these models fits on {num_nodes} or fewer nodes of {device}."]


def found_lines(subject: PlanInput, wanted: Changes, result: Result) -> Iterator[str]:
    """What a search found: how long a step is, and what to write for it."""
    for one in result.found:
        most = max(phase.num_bytes for phase in one.memory.phases)
        rate = f"{one.time.tokens_per_device_and_s:,.0f} tokens/s a device"
        yield f"{one.placement}: {one.time.seconds:.1f} s a step, {rate}, {gib(most)} at the fullest"
        yield f"  {subject.overrides(wanted | one.changes)}"
