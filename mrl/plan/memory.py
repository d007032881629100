"""READ THIS FIRST. Memory of every role on a device in every phase of a step, and whether it fits.

The phases of a pool follow `HybridEngine`. Before the engines take weights, the actor frees gradients and optimizer;
before they generate, also its parameters. Afterwards the engines sleep. Other roles on the same devices are moved off
meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mrl.config.arithmetic import (
    has_own_rollout_pool,
    has_reference,
    keeps_reference,
    needs_old_log_probs,
    role_batch,
    role_devices,
    role_mesh,
    shares_actor,
    teaches_itself,
)
from mrl.config.hardware import Hardware
from mrl.config.mesh import Mesh
from mrl.config.role_kinds import writes_tokens
from mrl.config.schema import Config
from mrl.config.sft import AnyConfig, RmConfig
from mrl.models.table import Head
from mrl.plan.activations import head_bytes
from mrl.plan.assumptions import ASSUMPTIONS, GIB, RESERVE, UNUSED
from mrl.plan.engine_memory import EngineMemory, engine_memory
from mrl.plan.plan_input import PlanInput, Planned
from mrl.plan.sharded import WholeTensors, role_activations, role_forward_bytes, role_weights
from mrl.plan.weights import WeightBytes, frozen_bytes

_ORIGINS = {
    "parameters": "Megatron's flat buffers, padding included",
    "gradients": "for the same elements, in float32 unless ddp.grad_reduce_in_fp32 is false",
    "optimizer": "float32 weights and Adam's two moments of the elements that the rank owns",
}
_SHARD_ORIGINS = {
    "parameters": "the rank's rows of every tensor, in float32 if they are trained",
    "optimizer": "Adam's two moments of the same elements",
}
_BUILDING = {
    "megatron": "the model's own, until they are moved to the buffers; or the optimizer's float32 weights",
    "fsdp": "packed rows against single rows: two gradients of the rank's rows, whole weights and whole gradients",
}


def head_of(config: AnyConfig, role: str) -> Head:
    if isinstance(config, RmConfig):
        return "score"
    return "lm" if writes_tokens(role) else "score"


def scoring_phase(role: str) -> str:
    """Return the name of the phase in which a role runs without learning."""
    return {"actor": "log-probs", "critic": "values"}.get(role) or role.replace("_", " ")


@dataclass(frozen=True)
class Item:
    """One part of a device's memory, and the origin of its number."""

    role: str
    what: str
    num_bytes: int
    origin: str


@dataclass(frozen=True)
class Phase:
    """One phase on the fullest device of a pool."""

    name: str
    pool: str
    items: tuple[Item, ...]

    @property
    def num_bytes(self) -> int:
        return sum(item.num_bytes for item in self.items)


@dataclass(frozen=True)
class MemoryShortfall:
    """A phase that does not fit."""

    phase: Phase
    what: str
    num_bytes: int


@dataclass(frozen=True)
class MemoryPlan:
    """All phases, the engines' cache, and the memory of the host."""

    hardware: Hardware
    phases: tuple[Phase, ...]
    engine: EngineMemory
    host_bytes_per_node: int

    @property
    def fullest(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.num_bytes)

    @property
    def shortages(self) -> list[MemoryShortfall]:
        """Return the phases that do not fit, worst first."""
        shortages = [
            MemoryShortfall(phase, "does not fit on the device", phase.num_bytes - self.hardware.memory_bytes)
            for phase in self.phases
            if phase.num_bytes > self.hardware.memory_bytes
        ]
        engine = self.engine
        if engine.cache_bytes < engine.sample_bytes:
            rollout = next(phase for phase in self.phases if phase.name == "rollout")
            what = "leaves no room in the engine's cache for one sample of full length"
            shortages.append(MemoryShortfall(rollout, what, engine.sample_bytes - engine.cache_bytes))
        return sorted(shortages, key=lambda shortage: -shortage.num_bytes)


@dataclass(frozen=True)
class Role:
    """A role at one pipeline stage."""

    name: str
    stage: int
    weights: WeightBytes
    train: tuple[Item, ...]
    """Memory of a training step in addition to the weights. Empty if the role is frozen."""
    score: tuple[Item, ...]
    """Memory of a forward pass in addition to the weights."""
    process: int
    """Memory of the process itself."""
    strategy: str = "megatron"

    def held(self, *parts: str) -> Iterator[Item]:
        """Yield the given parts of parameters, gradients and optimizer state."""
        origins, stage = _ORIGINS, f", stage {self.stage}"
        if self.strategy == "fsdp":
            origins, stage = _SHARD_ORIGINS, ""
        for part in parts:
            if num_bytes := getattr(self.weights, part):  # a frozen role has only parameters
                yield Item(self.name, part, num_bytes, f"{origins[part]}{stage}")

    def all_items(self) -> Iterator[Item]:
        """Yield all three, and the memory of the process itself."""
        yield from self.held("parameters", "gradients", "optimizer")
        yield self.reserve()

    @property
    def alone_bytes(self) -> int:
        """Return the memory of the role's work if it is alone on the device."""
        return sum(item.num_bytes for item in (*self.all_items(), *(self.train or self.score)))

    def reserve(self) -> Item:
        return Item(self.name, RESERVE, self.process, "assumed, by its groups and their peers")

    def build(self) -> Iterator[Item]:
        """Yield the memory while buffers are made. The model's own parameters exist at the same time."""
        yield from self.held("parameters", "gradients")
        what = "parameters" if self.strategy == "megatron" else "comparison"
        yield Item(self.name, what, self.weights.building, _BUILDING[self.strategy])
        yield self.reserve()


Stages = dict[str, tuple[Role, ...]]
"""The roles, each at all of its pipeline stages."""


def plan_memory(subject: PlanInput, stages: Stages | None = None) -> MemoryPlan:
    """Return the plan of a configuration. `stages` may contain the results of `role_stages` for each role."""
    config, hardware = subject.config, subject.hardware
    engine = engine_memory(config, subject.specs["actor"], hardware)
    stages = stages or {role: role_stages(subject, role) for role in subject.specs}
    phases = []
    for pool, size in config.placement.pools.items():
        here = [name for name in stages if config.placement.roles[name] == pool]
        # Find which stages of the roles share a device. Ranks are in the order of stages.
        meetings = {tuple(stages[name][rank * len(stages[name]) // size] for name in here) for rank in range(size)}
        by_place = [list(_phases(config, pool, roles, engine)) for roles in meetings]
        phases += [max(same, key=lambda phase: phase.num_bytes) for same in zip(*by_place, strict=True)]
    return MemoryPlan(hardware, tuple(phases), engine, _host_bytes(config, stages))


def update_phase(subject: Planned[Any]) -> Phase:
    """Return an update of supervised training on the fullest GPU. The model does not share its devices."""
    pool, stages = subject.config.placement.roles["actor"], role_stages(subject, "actor")
    phases = [Phase("train", pool, (*role.all_items(), *role.train)) for role in stages]
    return max(phases, key=lambda phase: phase.num_bytes)


def reference_host_bytes(subject: Planned[Any]) -> int:
    """Return the host memory of the reference in supervised training: the frozen weights, and space for the policy's
    while the frozen ones are in use. It is 0 if its log-probs are computed once."""
    config: AnyConfig = subject.config
    per_rank = 2 * max(role.weights.parameters for role in role_stages(subject, "actor")) * keeps_reference(config)
    return per_rank * _ranks_of_a_machine(config)


def role_stages(subject: Planned[Any], role: str) -> tuple[Role, ...]:
    stages = range(subject.config.model_roles()[role].parallel.pp)
    return tuple(_role_at_stage(subject, role, stage) for stage in stages)


def _divergence(subject: PlanInput) -> Iterator[Item]:
    """Yield the memory of a divergence from a teacher: the head's work again, and the teacher's columns of each
    tile."""
    config, distillation = subject.config, subject.config.algorithm.distillation
    if distillation is None or distillation.form not in ("top_k", "full"):
        return
    is_full = distillation.form == "full"
    bytes_of = partial(head_bytes, model=config.actor, head="lm", device=config.cluster.device)
    teacher = bytes_of(subject.specs["teacher" if is_full else "actor"], backward=is_full)
    origin = "the head again, and as much for the teacher" + ("'s, its output matrix included" if is_full else "")
    yield Item("actor", "divergence", bytes_of(subject.specs["actor"], backward=True) + teacher, origin)


def _role_at_stage(subject: Planned[Any], name: str, stage: int) -> Role:
    config, spec = subject.config, subject.specs[name]
    model, head = config.model_roles()[name], head_of(config, name)
    batch = role_batch(config, name)
    tokens = f"{model.max_tokens_per_device} tokens of a micro-batch on a device"
    item, device = partial(Item, name), config.cluster.device
    mesh = role_mesh(config, name)
    held = role_weights(spec, model, mesh, head, stage)
    shares = shares_actor(config, name)
    if shares:
        held = replace(held, parameters=held.parameters - frozen_bytes(spec, model, mesh, head, stage))
    kept = role_activations(spec, model, stage, batch.max_micro_batches, device)
    layer_origin = "recomputed tensors, gradients, gathered sequences, and the gradient of the largest weight"
    at_work = max(kept.at_work + held.layer_weight, held.largest_parameter) + held.dequantized
    backward = [[item("layer at work", at_work, layer_origin)]]
    in_forward = role_forward_bytes(spec, model, stage) + held.dequantized
    forward = [[item("activations", in_forward, f"{tokens}, one layer at a time")]]
    if stage == model.parallel.pp - 1:
        scored, origin = partial(head_bytes, spec, model, head, device=device), f"{tokens}, if all are scored"
        more = _divergence(subject) if name == "actor" and isinstance(config, Config) else ()
        backward.append([item("head", scored(backward=True), origin), *more])
        forward.append([item("head", scored(backward=False), origin)])
    if model.strategy == "fsdp":
        whole, origin = WholeTensors.of(spec, model, head), "whole weights of two layers and of embedding and head"
        gathered = partial(item, "gathered")
        released = kept.kept // spec.num_layers
        in_layers = whole.backward(kept.kept + at_work, released)
        backward[0].append(gathered(in_layers, f"{origin}, and whole gradients"))
        forward[0].append(gathered(whole.forward(in_forward), origin))
        for works in (backward, forward):
            works[1].append(gathered(whole.in_head, "whole weights of embedding and head"))
    # Head and layers never work at the same time.
    train, score = (max(works, key=_total) for works in (backward, forward))
    is_of_layers, working = score == forward[0], kept.at_work if train == backward[0] else 0
    activations = item("activations", kept.kept, f"{tokens}, stage {stage}")
    unused = [_unused(name, in_forward)] if is_of_layers else []
    if model.strategy == "fsdp":
        origin = "of the rank's rows, in float32; dropped after the update"
        train = [item("gradients", held.optimizer // 2, origin), *train]
    train = [activations, *train, _unused(name, kept.kept + working)]
    score = [*score, *unused]
    work = tuple(train) if name in config.trained_roles() else ()
    return Role(name, stage, held, work, tuple(score), 0 if shares else process_bytes(mesh), model.strategy)


def _unused(role: str, num_bytes: int) -> Item:
    share = ASSUMPTIONS.allocator_share
    return Item(
        role, UNUSED, math.ceil(num_bytes * share), f"assumed, {share:.0%} of activations in blocks of other sizes"
    )


def _total(items: Iterable[Item]) -> int:
    return sum(item.num_bytes for item in items)


def process_bytes(mesh: Mesh) -> int:
    """Return the memory of a trainer process itself: CUDA, its libraries, and NCCL's buffers."""
    sizes = (mesh.world_size, mesh.tp, mesh.cp, mesh.dp, mesh.pp, mesh.ep, mesh.etp)
    num_groups = sum(size > 1 for size in sizes)
    # Experts exchange tokens with all other expert ranks, the reshard slices with the ranks of a whole model.
    peers = (mesh.ep * mesh.etp - 1) + (min(mesh.world_size, mesh.pp * max(mesh.tp, mesh.ep * mesh.etp)) - 1)
    at = ASSUMPTIONS
    return at.process_bytes + num_groups * at.communicator_bytes + peers * at.peer_bytes


def _phases(config: Config, pool: str, roles: tuple[Role, ...], engine: EngineMemory) -> Iterator[Phase]:
    """Yield the phases of a pool on which these roles are placed."""
    everything = [item for role in roles for item in role.all_items()]
    awake = [Item("rollout", *part) for part in engine.parts]
    while_taking, while_generating, while_scoring, engine_items = everything, everything, everything, awake
    if config.sync.offload and not has_own_rollout_pool(config):
        actors = [role for role in roles if role.name == "actor"]
        while_generating = [role.reserve() for role in roles]
        models = [role for role in roles if role.name in config.scoring_models()]
        if actors:  # in the middle of a rollout, while engines sleep and all other roles are moved off
            while_scoring = [*while_generating, *(item for role in models for item in role.held("parameters"))]
        while_taking = [*while_generating, *(item for role in actors for item in role.held("parameters"))]
        engine_items = [item for item in awake if item.what == RESERVE]  # asleep
    for number, role in enumerate(roles):
        earlier = [item for other in roles[:number] for item in other.all_items()]
        yield Phase(f"build {role.name}", pool, (*earlier, *role.build()))
    buckets = Item("rollout", "buckets", engine.bucket_bytes, "twice sync.bucket_bytes, or two of the largest tensor")
    if has_own_rollout_pool(config) and rollout_pool(config) == pool:
        origin = "assumed, for the process that receives weights"
        receiver = Item("rollout", "receiver", ASSUMPTIONS.receiver_bytes, origin)
        yield Phase("weights", pool, (*awake, receiver, buckets))
        yield Phase("rollout", pool, (*awake, receiver))
    elif rollout_pool(config) == pool:
        taking = (
            [item for item in awake if item.what in ("weights", "adapters", RESERVE)] if config.sync.offload else awake
        )
        counts = Item(
            "rollout", "counts", engine.count_bytes, "token counts per sequence, in the memory pool of the weights"
        )
        yield Phase("weights", pool, (*while_taking, *taking, counts, buckets))
        yield Phase("rollout", pool, (*while_generating, *awake))
    else:
        engine_items = []
        if any(role.name == "actor" for role in roles):
            origin = "messages to the engines' devices"
            sent = Item("actor", "messages", engine.message_bytes, origin)
            yield Phase("weights", pool, (*everything, sent))
    for role in roles:
        if role.name != "actor" or needs_old_log_probs(config) or has_reference(config) or teaches_itself(config):
            present = while_scoring if role.name in config.scoring_models() else everything
            yield Phase(scoring_phase(role.name), pool, (*present, *engine_items, *role.score))
        if role.train:
            yield Phase(f"train {role.name}", pool, (*everything, *engine_items, *role.train))


def _host_bytes(config: Config, stages: Stages) -> int:
    """Return the peak host memory: roles that take turns with the engines, the reference, and the checkpoint being
    written."""
    takes_turns, pools = config.sync.offload and not has_own_rollout_pool(config), config.placement.roles
    per_rank = max(role.weights.parameters for role in stages["actor"]) if keeps_reference(config) else 0
    for name, role_at_stages in stages.items():
        per_rank += max(role.weights.checkpoint for role in role_at_stages)
        if takes_turns and pools[name] == pools["actor"]:
            per_rank += max(role.weights.parameters + role.weights.optimizer for role in role_at_stages)
    return per_rank * _ranks_of_a_machine(config)


def _ranks_of_a_machine(config: AnyConfig) -> int:
    return min(config.cluster.devices_per_node, role_devices(config, "actor"))


def rollout_pool(config: Config) -> str:
    return config.placement.roles["rollout" if has_own_rollout_pool(config) else "actor"]


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
