"""The smallest changes of a configuration that make it fit, tried out rather than guessed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any, TypeVar

from mrl.config.arithmetic import longest_sample_tokens
from mrl.config.hardware import DEFAULT_UTILIZATION
from mrl.config.schema import Config
from mrl.plan.memory import MemoryPlan, plan_memory
from mrl.plan.plan_input import PlanInput

_MAX_TOGETHER = 3
_MAX_TRIED = 1000
Changes = dict[str, Any]
Plan = TypeVar("Plan")
FULL_RECOMPUTATION = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@dataclass(frozen=True)
class Advice:
    """Other values, and the plan with them."""

    changes: Changes
    plan: MemoryPlan


def advise(subject: PlanInput, most: int = 4) -> list[Advice]:
    """Return up to so many ways to make it fit, each of as few kinds of change as any; empty where none was found."""

    def fitting(varied: PlanInput) -> MemoryPlan | None:
        plan = plan_memory(varied)
        return None if plan.shortages else plan

    return [Advice(*found) for found in smallest_changes(subject, _ladders(subject), fitting, most)]


def smallest_changes(
    subject: PlanInput, ladders: Iterable[list[Changes]], fitting: Callable[[PlanInput], Plan | None], most: int
) -> list[tuple[Changes, Plan]]:
    """Return rungs of as few ladders as any that make it fit, with what `fitting` gives for them."""
    ladders = [ladder for ladder in ladders if any(ladder)]
    num_tried = 0
    for together in range(1, _MAX_TOGETHER + 1):
        found: list[tuple[Changes, Plan]] = []
        for chosen in combinations(ladders, together):
            for rungs in product(*chosen):
                num_tried += 1
                changes = {key: value for rung in rungs for key, value in rung.items()}
                varied = subject.with_changes(changes)
                if varied is not None and (plan := fitting(varied)) is not None:
                    found.append((changes, plan))
                    break  # the first rung that does is the smallest
            if len(found) == most or num_tried > _MAX_TRIED:
                return found
        if found:
            return found
    return []


def _ladders(subject: PlanInput) -> Iterator[list[Changes]]:
    """Yield kinds of change, those that cost least first; of each kind the steps, the smallest first."""
    config = subject.config
    roles = config.model_roles()
    utilization = config.rollout.vllm.get("gpu_memory_utilization", DEFAULT_UTILIZATION)
    lower = [round(utilization - 0.05 * step, 2) for step in range(1, 13)]
    yield [{"rollout.vllm.gpu_memory_utilization": each} for each in lower if each >= 0.3]
    yield [{"rollout.vllm.gpu_memory_utilization": each} for each in (0.7, 0.8, 0.9) if each > utilization]
    yield [{f"{role}.parallel.sequence_parallel": True for role, model in roles.items() if model.parallel.tp > 1}]
    yield from activation_ladders(config)
    yield [{"rollout.tp": config.rollout.tp * factor} for factor in (2, 4, 8)]
    for axis in ("tp", "pp"):
        yield [_split_more(subject, axis, factor) for factor in (2, 4, 8)]
    if subject.specs["actor"].moe:
        yield [_split_more(subject, "ep", factor) for factor in (2, 4, 8)]
    yield [_more_nodes(subject, factor) for factor in (2, 4, 8)]


def activation_ladders(config: Config) -> Iterator[list[Changes]]:
    """Yield smaller micro-batches, and layers that are computed again."""
    longest = longest_sample_tokens(config.rollout)
    shares = (0.75, 0.5, 0.25, 0.125, 0.0)
    yield [
        {
            f"{role}.max_tokens_per_device": max(
                int(model.max_tokens_per_device * share), -(-longest // model.parallel.cp)
            )
            for role, model in config.model_roles().items()
        }
        for share in shares
    ]
    yield [
        {
            f"{role}.megatron.{key}": value
            for role in config.trained_roles()
            for key, value in FULL_RECOMPUTATION.items()
        }
    ]


def _split_more(subject: PlanInput, axis: str, factor: int) -> Changes:
    changes: Changes = {}
    for role, model in subject.config.model_roles().items():
        size = getattr(model.parallel, axis) * factor
        changes[f"{role}.parallel.{axis}"] = size
        if axis == "tp" and size > 1:
            changes[f"{role}.parallel.sequence_parallel"] = True
    return changes


def _more_nodes(subject: PlanInput, factor: int) -> Changes:
    config = subject.config
    changes: Changes = {"cluster.nodes": config.cluster.nodes * factor}
    changes |= {f"placement.pools.{pool}": size * factor for pool, size in config.placement.pools.items()}
    if config.cluster.ray_address is None:
        changes["cluster.ray_address"] = "auto"
    return changes
