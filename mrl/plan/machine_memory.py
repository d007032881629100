"""Memory of a machine whose devices are CPU slots: a lower and an upper bound.

The lower bound counts what certainly exists: parts of models, what a step keeps for backward, an engine's weights and
cache, and libraries in an idle process. The upper bound adds what allocators keep between blocks, and memory that is
rarely all used. Engines do not sleep on a CPU, and every role frees memory after its phase, so the peak is a phase with
one role at work.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mrl.config.arithmetic import (
    engine_nodes,
    has_own_rollout_pool,
    keeps_reference,
    num_engines,
    role_batch,
    role_devices,
)
from mrl.config.hardware import Hardware
from mrl.config.schema import Config
from mrl.config.sft import AnyConfig
from mrl.dtypes import ITEM_BYTES
from mrl.models.rollout_table import engine_bytes
from mrl.plan.assumptions import ASSUMPTIONS, GIB
from mrl.plan.engine_memory import engine_memory
from mrl.plan.memory import gib, role_stages
from mrl.plan.plan_input import PlanInput, Planned, model_specs
from mrl.plan.search import Changes, activation_ladders, smallest_changes

_MIN_SAMPLES = 4
"""Samples of full length that a proposed cache must hold."""


@dataclass(frozen=True)
class Processes:
    """Identical processes and their memory."""

    name: str
    count: int
    held: int
    """Bytes that each process always holds."""
    work: int
    """Additional bytes in its phase."""
    spare: int
    """Possible additional bytes: in its phase, or always for an engine."""

    @property
    def most(self) -> int:
        return self.held + self.work + self.spare


@dataclass(frozen=True)
class MachinePlan:
    """Memory of a node of a run on CPU slots; the mean if there are several nodes."""

    processes: tuple[Processes, ...]
    fullest: str
    """Role whose phase needs the most memory."""
    min_bytes: int
    max_bytes: int

    def lines(self) -> Iterator[str]:
        for process in self.processes:
            number = f"{process.count} x " if process.count > 1 else ""
            at_work = f" (at work {gib(process.most)})" if process.most > process.held else ""
            yield f"{process.name} {number}{gib(process.held)}{at_work}"


def machine_plan_input(config: AnyConfig, usable_bytes: int, model: str | None = None) -> Planned[Any]:
    """Return a configuration with a machine as its device, of which only the memory is known."""
    device = Hardware("this machine", usable_bytes, 0.0, 0.0, 0.0, 0.0, 0.0)
    subject: Planned[Any] = Planned(config, model_specs(config, model), device)
    subject.check_layouts()
    return subject


def plan_machine(subject: Planned[Any]) -> MachinePlan:
    """Return the memory of all processes of a node."""
    config: AnyConfig = subject.config
    roles = [_ranks(subject, role) for role in subject.specs]
    copies = sum(
        stage.weights.checkpoint * role_devices(config, role) // model.parallel.pp
        for role, model in config.trained_roles().items()
        for stage in role_stages(subject, role)
    )
    rest = [
        *([_engines(subject)] if isinstance(config, Config) else []),
        Processes("checkpoint", 1, 0, 0, copies),
        Processes("driver and Ray", 1, ASSUMPTIONS.cpu_run_bytes, 0, ASSUMPTIONS.cpu_run_bytes // 2),
    ]
    processes = (*roles, *rest)
    fullest = max(roles, key=lambda role: role.count * (role.work + role.spare))
    least = sum(process.count * process.held for process in processes) + fullest.count * fullest.work
    most = least + sum(process.count * process.spare for process in (fullest, *rest))
    used = min(config.cluster.nodes, -(-sum(config.placement.pools.values()) // config.cluster.devices_per_node))
    return MachinePlan(processes, fullest.name, least // used, most // used)


def advise_machine(subject: PlanInput, left_bytes: int) -> Changes | None:
    """Return the smallest change with which a run fits into the remaining memory, including allocator overhead."""

    def fitting(varied: PlanInput) -> MachinePlan | None:
        plan = plan_machine(varied)
        return plan if plan.max_bytes <= left_bytes else None

    return next((changes for changes, _ in smallest_changes(subject, _ladders(subject), fitting, max_found=1)), None)


def _ladders(subject: PlanInput) -> Iterator[list[Changes]]:
    """Yield kinds of change, cheapest first, each with its steps, smallest first."""
    config = subject.config
    yield [{"sync.offload": False}]
    engine = engine_memory(config, subject.specs["actor"], subject.hardware)
    caches = [min(engine.cache_bytes, 8_000_000_000) // part for part in (2, 4, 8, 16)]
    fewest = _MIN_SAMPLES * engine.sample_bytes
    yield [{"rollout.vllm.kv_cache_memory_bytes": size} for size in caches if size >= fewest]
    yield from activation_ladders(subject)
    yield [{"rollout.replicas": fewer} for fewer in range(num_engines(config) - 1, 0, -1)]
    pools = config.placement.pools.items()
    yield [{f"placement.pools.{pool}": -(-size // part) for pool, size in pools} for part in (2, 4)]


def _ranks(subject: Planned[Any], name: str) -> Processes:
    """Return the ranks of a role. If pipeline stages differ, return their mean: all have the same number of ranks."""
    config: AnyConfig = subject.config
    share, model = role_batch(config, name), config.model_roles()[name]
    # At least this many tokens are never present at once, even if more fit into a micro-batch.
    tokens = min(model.max_tokens_per_device, share.samples_per_rank * share.longest_sample_tokens // model.parallel.cp)
    stages = role_stages(subject.with_changes_unchecked({f"{name}.max_tokens_per_device": tokens}), name)
    num_copies, copied, buckets = int(name == "actor" and keeps_reference(config)), False, 0
    if isinstance(config, Config):
        turns = config.sync.offload and not has_own_rollout_pool(config)
        copied = turns and config.placement.roles[name] == config.placement.roles["actor"]
        buckets = _bucket_bytes(subject) * (name == "actor")
    else:
        num_copies *= 2  # the frozen weights, and space for the policy's while the frozen ones are in use
    held, work = 0, 0
    for stage in stages:
        weights = stage.weights
        host = (weights.parameters + weights.optimizer) * copied  # kept for the next time they are moved off
        held += weights.total + host + weights.parameters * num_copies
        work += sum(item.num_bytes for item in stage.train or stage.score)
    held, work = held // len(stages), work // len(stages)
    spare = int(work * ASSUMPTIONS.cpu_allocator_share) + buckets
    return Processes(name, role_devices(config, name), ASSUMPTIONS.cpu_rank_bytes + held, work, spare)


def _engines(subject: PlanInput) -> Processes:
    config, spec = subject.config, subject.specs["actor"]
    parts = {name: num_bytes for name, num_bytes, _ in engine_memory(config, spec, subject.hardware).parts}
    # vLLM prefers this variable
    workers, space = config.rollout.num_devices, int(os.environ.get("VLLM_CPU_KVCACHE_SPACE") or 0) * GIB
    cache = (space or parts["cache"]) * (config.rollout.engine == "vllm")
    processes = workers + engine_nodes(config) * (workers > 1)
    held = workers * (parts["weights"] + cache) + processes * ASSUMPTIONS.cpu_engine_bytes
    packed = spec.vocab * spec.hidden * ITEM_BYTES[config.actor.dtype] * spec.tied  # a second copy of the head
    spare = workers * (parts["work space"] + _bucket_bytes(subject)) + packed
    return Processes("engines", num_engines(config), held, 0, spare)


def _bucket_bytes(subject: PlanInput) -> int:
    """Return the size of the transfer buckets that one of the two sides may still hold."""
    config = subject.config
    num_bytes, _ = engine_bytes(
        subject.specs["actor"], config.rollout.tp, config.actor.dtype, pp=config.rollout.pp, dp=config.rollout.dp
    )
    return min(config.sync.bucket_bytes, num_bytes)
