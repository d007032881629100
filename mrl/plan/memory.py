"""READ THIS FIRST. What every role has on a device in every phase of a step, and whether it fits.

The phases of a pool follow `HybridEngine`: before the engines take weights the actor gives up gradients and optimizer,
before they generate its parameters too; afterwards they sleep. Other roles on the same devices leave them for as long.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mrl.config.arithmetic import (
    has_own_rollout_pool,
    has_reference,
    longest_sample_tokens,
    needs_old_log_probs,
    num_engines,
    role_batch,
    role_devices,
    role_mesh,
)
from mrl.config.hardware import DEFAULT_UTILIZATION, Hardware
from mrl.config.schema import Config
from mrl.config.sft import AnyConfig
from mrl.dtypes import ITEM_BYTES
from mrl.errors import PlacementError
from mrl.models.rollout_table import EngineSizes
from mrl.models.spec import ModelSpec
from mrl.models.table import Head
from mrl.plan.activations import forward_activations, head_bytes, stage_activations
from mrl.plan.assumptions import ASSUMPTIONS, GIB
from mrl.plan.plan_input import PlanInput, Planned
from mrl.plan.weights import WeightBytes, engine_elements, stage_weights

# vLLM's own, which depend on the device:
_BATCHED_TOKENS, _FEW_BATCHED_TOKENS, _SEQUENCES, _FEW_SEQUENCES, _LARGE_DEVICE = 16384, 8192, 1024, 256, 70 * GIB
RESERVE = "CUDA and NCCL"
_SLOT_SHARE = 0.75  # of the memory for two buckets, as the reshard divides it
_ORIGINS = {
    "parameters": "Megatron's flat buffers, padding included",
    "gradients": "of the same elements, in float32 unless ddp.grad_reduce_in_fp32 is false",
    "optimizer": "float32 weights and Adam's two moments of the elements that the rank owns",
}


def head_of(role: str) -> Head:
    return "lm" if role in ("actor", "reference", "teacher") else "score"


def scoring_phase(role: str) -> str:
    """Return what the phase is called in which a role runs without learning."""
    return {"actor": "log-probs", "critic": "values"}.get(role) or role.replace("_", " ")


@dataclass(frozen=True)
class Item:
    """Something on a device, and where its number comes from."""

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
    """A phase that cannot be."""

    phase: Phase
    what: str
    num_bytes: int


@dataclass(frozen=True)
class MemoryPlan:
    """All phases, the engines' cache, and what stands on the host."""

    hardware: Hardware
    phases: tuple[Phase, ...]
    engine: EngineMemory
    host_bytes_per_node: int

    @property
    def fullest(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.num_bytes)

    @property
    def shortages(self) -> list[MemoryShortfall]:
        """Return what does not fit, the worst first; empty where all does."""
        found = [
            MemoryShortfall(phase, "does not fit on the device", phase.num_bytes - self.hardware.memory_bytes)
            for phase in self.phases
            if phase.num_bytes > self.hardware.memory_bytes
        ]
        engine = self.engine
        if engine.cache_bytes < engine.sample_bytes:
            rollout = next(phase for phase in self.phases if phase.name == "rollout")
            what = "leaves the engine's cache no room for one sample of full length"
            found.append(MemoryShortfall(rollout, what, engine.sample_bytes - engine.cache_bytes))
        return sorted(found, key=lambda shortage: -shortage.num_bytes)


@dataclass(frozen=True)
class Role:
    """A role at one pipeline stage."""

    name: str
    stage: int
    weights: WeightBytes
    train: tuple[Item, ...]
    """What a training step has beside the weights; nothing where the role is frozen."""
    score: tuple[Item, ...]
    """What a forward pass has beside the weights."""

    def held(self, *parts: str) -> Iterator[Item]:
        """Yield those of parameters, gradients and optimizer state."""
        for part in parts:
            if num_bytes := getattr(self.weights, part):  # a frozen role has parameters alone
                yield Item(self.name, part, num_bytes, f"{_ORIGINS[part]}, stage {self.stage}")

    def all_items(self) -> Iterator[Item]:
        """Yield all three, and what the process takes for itself."""
        yield from self.held("parameters", "gradients", "optimizer")
        yield self.reserve()

    @property
    def alone_bytes(self) -> int:
        """Return what its work takes if nobody else is on the device."""
        return sum(item.num_bytes for item in (*self.all_items(), *(self.train or self.score)))

    def reserve(self) -> Item:
        return Item(self.name, RESERVE, ASSUMPTIONS.trainer_reserve_bytes, "assumed, for each trainer process")


Stages = dict[str, tuple[Role, ...]]
"""The roles, each at all of its pipeline stages."""


def plan_memory(subject: PlanInput, stages: Stages | None = None) -> MemoryPlan:
    """Return the plan of a configuration; `stages` may hold what `role_stages` gave for each of its roles."""
    config, hardware = subject.config, subject.hardware
    engine = engine_memory(config, subject.specs["actor"], hardware)
    stages = stages or {role: role_stages(subject, role) for role in subject.specs}
    phases = []
    for pool, size in config.placement.pools.items():
        here = [name for name in stages if config.placement.roles[name] == pool]
        # Which stages of the roles meet on a device: ranks are in the order of stages.
        meetings = {tuple(stages[name][rank * len(stages[name]) // size] for name in here) for rank in range(size)}
        by_place = [list(_phases(config, pool, roles, engine)) for roles in meetings]
        phases += [max(same, key=lambda phase: phase.num_bytes) for same in zip(*by_place, strict=True)]
    return MemoryPlan(hardware, tuple(phases), engine, _host_bytes(config, stages))


def update_phase(subject: Planned[Any]) -> Phase:
    """Return an update of supervised training on the fullest GPU; one model shares its devices with nobody."""
    pool, stages = subject.config.placement.roles["actor"], role_stages(subject, "actor")
    phases = [Phase("train", pool, (*role.all_items(), *role.train)) for role in stages]
    return max(phases, key=lambda phase: phase.num_bytes)


def reference_host_bytes(subject: Planned[Any]) -> int:
    """Return what the reference of supervised training takes of a machine's own memory: frozen weights, and room for
    the policy's while those are in their place; none where its log-probs are computed once."""
    config: AnyConfig = subject.config
    per_rank = 2 * max(role.weights.parameters for role in role_stages(subject, "actor")) * has_reference(config)
    return per_rank * _ranks_of_a_machine(config)


def role_stages(subject: Planned[Any], role: str) -> tuple[Role, ...]:
    stages = range(subject.config.model_roles()[role].parallel.pp)
    *first, last = (_role_at_stage(subject.config, subject.specs[role], role, stage) for stage in stages)
    if role == "actor" and isinstance(subject.config, Config):
        last = replace(last, train=(*last.train, *_divergence(subject)))
    return (*first, last)


def _divergence(subject: PlanInput) -> Iterator[Item]:
    """Yield what a divergence from a teacher takes: the head's work again, and the teacher's columns of each tile."""
    config, distillation = subject.config, subject.config.algorithm.distillation
    if distillation is None or distillation.form not in ("top_k", "full"):
        return
    is_full = distillation.form == "full"
    head_of = partial(head_bytes, model=config.actor, head="lm", device=config.cluster.device)
    teacher = head_of(subject.specs["teacher" if is_full else "actor"], backward=is_full)
    origin = "the head once more, and as much of the teacher" + ("'s, its output matrix included" if is_full else "")
    yield Item("actor", "divergence", head_of(subject.specs["actor"], backward=True) + teacher, origin)


def _role_at_stage(config: AnyConfig, spec: ModelSpec, name: str, stage: int) -> Role:
    model, head = config.model_roles()[name], head_of(name)
    batch = role_batch(config, name)
    tokens = f"{model.max_tokens_per_device} tokens of a micro-batch on a device"
    item = partial(Item, name)
    held = stage_weights(spec, model, role_mesh(config, name), head, stage)
    train = [
        item("activations", stage_activations(spec, model, stage, batch.max_micro_batches), f"{tokens}, stage {stage}"),
        item("a weight's gradient", held.largest_parameter, "of the largest parameter, before it is added up"),
    ]
    score = [item("activations", forward_activations(spec, model), f"{tokens}, one layer at a time")]
    scored = partial(head_bytes, spec, model, head, device=config.cluster.device)
    if stage == model.parallel.pp - 1:
        train.append(item("head", scored(backward=True), f"{tokens}, if all are scored"))
        score.append(item("head", scored(backward=False), f"{tokens}, if all are scored"))
    return Role(name, stage, held, tuple(train) if name in config.trained_roles() else (), tuple(score))


def _phases(config: Config, pool: str, roles: tuple[Role, ...], engine: EngineMemory) -> Iterator[Phase]:
    """Yield the phases of a pool where these roles meet."""
    everything = [item for role in roles for item in role.all_items()]
    awake = [Item("rollout", *part) for part in engine.parts]
    while_taking, while_generating, while_scoring, beside = everything, everything, everything, awake
    if config.sync.offload and not has_own_rollout_pool(config):
        actors = [role for role in roles if role.name == "actor"]
        while_generating = [role.reserve() for role in roles]
        models = [role for role in roles if role.name in config.scoring_models()]
        if actors:  # in the middle of a rollout, while engines sleep and all others are away
            while_scoring = [*while_generating, *(item for role in models for item in role.held("parameters"))]
        while_taking = [*while_generating, *(item for role in actors for item in role.held("parameters"))]
        beside = [item for item in awake if item.what == RESERVE]  # asleep
    buckets = Item("rollout", "buckets", engine.bucket_bytes, "twice sync.bucket_bytes, or two of the largest tensor")
    if has_own_rollout_pool(config) and rollout_pool(config) == pool:
        origin = "assumed, of the process that takes weights"
        receiver = Item("rollout", "receiver", ASSUMPTIONS.trainer_reserve_bytes, origin)
        yield Phase("weights", pool, (*awake, receiver, buckets))
        yield Phase("rollout", pool, (*awake, receiver))
    elif rollout_pool(config) == pool:
        taking = [item for item in awake if item.what != "cache"] if config.sync.offload else awake
        yield Phase("weights", pool, (*while_taking, *taking, buckets))
        yield Phase("rollout", pool, (*while_generating, *awake))
    else:
        beside = []
        if any(role.name == "actor" for role in roles):
            yield Phase("weights", pool, (*everything, buckets))
    for role in roles:
        if role.name != "actor" or needs_old_log_probs(config) or has_reference(config):
            present = while_scoring if role.name in config.scoring_models() else everything
            yield Phase(scoring_phase(role.name), pool, (*present, *beside, *role.score))
        if role.train:
            yield Phase(f"train {role.name}", pool, (*everything, *beside, *role.train))


def _host_bytes(config: Config, stages: Stages) -> int:
    """Return the fullest machine's memory of roles that take turns with the engines, of the reference, and of the
    checkpoint that is being written."""
    takes_turns, pools = config.sync.offload and not has_own_rollout_pool(config), config.placement.roles
    per_rank = max(role.weights.parameters for role in stages["actor"]) if has_reference(config) else 0
    for name, of_role in stages.items():
        per_rank += max(role.weights.checkpoint for role in of_role)
        if takes_turns and pools[name] == pools["actor"]:
            per_rank += max(role.weights.parameters + role.weights.optimizer for role in of_role)
    return per_rank * _ranks_of_a_machine(config)


def _ranks_of_a_machine(config: AnyConfig) -> int:
    return min(config.cluster.devices_per_node, role_devices(config, "actor"))


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


# --- engines ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EngineMemory:
    """One device of an engine."""

    parts: tuple[tuple[str, int, str], ...]
    """What, bytes and origin."""
    cache_bytes: int
    token_bytes: int
    """Keys and values of one token on one device."""
    sample_bytes: int
    """Of a sample of full length."""
    max_sequences: int
    """That vLLM runs at a time."""
    bucket_bytes: int
    """On both sides while weights come in."""

    @property
    def cache_tokens(self) -> int:
        return max(0, self.cache_bytes) // self.token_bytes

    @property
    def full_samples(self) -> int:
        """Return the samples of full length that an engine works on at a time."""
        return min(max(0, self.cache_bytes) // self.sample_bytes, self.max_sequences)


def rollout_pool(config: Config) -> str:
    return config.placement.roles["rollout" if has_own_rollout_pool(config) else "actor"]


def engine_memory(config: Config, spec: ModelSpec, hardware: Hardware) -> EngineMemory:
    """Return what vLLM takes, and what it leaves for its cache."""
    rollout, given = config.rollout, config.rollout.vllm
    EngineSizes(rollout.tp).check(spec)
    if num_engines(config) < 1:
        raise PlacementError(f"no engine of {rollout.tp} devices fits on the devices that it may use")
    item = ITEM_BYTES[given.get("dtype", config.actor.dtype)]
    elements, largest = engine_elements(spec, rollout.tp)
    is_large = hardware.memory_bytes >= _LARGE_DEVICE
    tokens = given.get("max_num_batched_tokens") or (_BATCHED_TOKENS if is_large else _FEW_BATCHED_TOKENS)
    sequences = given.get("max_num_seqs") or (_SEQUENCES if is_large else _FEW_SEQUENCES)
    work = tokens * _widest(spec, rollout.tp) * item + 3 * sequences * spec.vocab * 4
    reserve = ASSUMPTIONS.engine_reserve_bytes
    token_bytes = 2 * spec.num_layers * max(1, spec.num_kv_heads // rollout.tp) * spec.head_dim * item
    utilization = given.get("gpu_memory_utilization", DEFAULT_UTILIZATION)
    cache = int(utilization * hardware.memory_bytes) - elements * item - work - reserve
    origin = f"gpu_memory_utilization {utilization:g} of the device, less the above"
    if given.get("kv_cache_memory_bytes") is not None:
        cache, origin = int(given["kv_cache_memory_bytes"]), "kv_cache_memory_bytes"
    return EngineMemory(
        parts=(
            ("weights", elements * item, f"{elements:,} elements of a worker at tp {rollout.tp}, {item} bytes each"),
            ("work space", work, f"{tokens} tokens of a prefill, three copies of logits of {sequences} sequences"),
            (RESERVE, reserve, "assumed, of an engine's process, its captured graphs included"),
            ("cache", max(0, cache), origin),
        ),
        cache_bytes=cache,
        token_bytes=token_bytes,
        sample_bytes=token_bytes * longest_sample_tokens(rollout),
        max_sequences=sequences,
        bucket_bytes=2 * max(config.sync.bucket_bytes, int(largest * item / _SLOT_SHARE)),
    )


def _widest(spec: ModelSpec, tp: int) -> int:
    """Return the elements per token of a layer at work: hidden states, and the widest of its parts."""
    attention = spec.qkv_rows // tp
    mlp = 3 * spec.ffn // tp
    if spec.moe:
        mlp = max(mlp, spec.moe.experts_per_token * (spec.hidden + 3 * spec.moe.expert_ffn // tp))
    return 3 * spec.hidden + max(attention, mlp)
