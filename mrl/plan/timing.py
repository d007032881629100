"""Predicted seconds of each phase of a step: work divided by the rate of the devices, with stated efficiencies.

The phases of a step run one after another, so their sum is the step. Nothing is measured here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from mrl.config.arithmetic import (
    gets_adapters_only,
    has_own_rollout_pool,
    has_reference,
    needs_old_log_probs,
    num_engines,
    role_mesh,
    samples_per_step,
    shows_success,
    teaches_itself,
    updates_per_step,
)
from mrl.config.mesh import Mesh
from mrl.config.role_kinds import kind_of
from mrl.config.schema import Config, MegatronModelConfig
from mrl.dtypes import ITEM_BYTES
from mrl.models.adapters import adapter_flops_per_token, adapter_tensors
from mrl.models.spec import ModelSpec
from mrl.models.windows import mean_visible
from mrl.plan.assumptions import ASSUMPTIONS
from mrl.plan.engine_memory import EngineMemory, engine_memory
from mrl.plan.memory import head_of, scoring_phase
from mrl.plan.plan_input import PlanInput
from mrl.plan.reshard_traffic import busiest_traffic, handed_over, sent_sizes
from mrl.plan.sharded import copied_bytes, exchanged_bytes, role_weights
from mrl.plan.weights import buffers


@dataclass(frozen=True)
class Lengths:
    """Mean tokens of prompts and responses."""

    prompt: float
    response: float

    @property
    def whole(self) -> float:
        return self.prompt + self.response


@dataclass(frozen=True)
class TimedPhase:
    """One phase of a step, with its parts."""

    name: str
    parts: dict[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class TimePlan:
    phases: tuple[TimedPhase, ...]
    num_tokens: float
    num_devices: int

    @property
    def seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases)

    @property
    def tokens_per_device_and_s(self) -> float:
        return self.num_tokens / self.seconds / self.num_devices


def assumed_lengths(config: Config) -> Lengths:
    prompt = ASSUMPTIONS.mean_prompt_share * config.rollout.max_prompt_tokens
    return Lengths(prompt, ASSUMPTIONS.mean_response_share * config.rollout.max_response_tokens)


def plan_time(subject: PlanInput, lengths: Lengths) -> TimePlan:
    config = subject.config
    phases = [TimedPhase("weights", _weights(subject)), rollout_phase(subject, lengths)]
    phases += [phase for role in subject.specs for phase in role_phases(subject, role, lengths)]
    num_tokens = samples_per_step(config.batch) * lengths.whole
    return TimePlan(tuple(phases), num_tokens, sum(config.placement.pools.values()))


def role_phases(subject: PlanInput, role: str, lengths: Lengths) -> Iterator[TimedPhase]:
    config = subject.config
    forward = partial(_work, subject, role, lengths, trains=False)
    # A success is a response, in the teacher's prompt.
    read = Lengths(lengths.whole, lengths.response) if shows_success(config.algorithm) else lengths
    teach = partial(_work, subject, role, read, trains=False)
    if role not in config.trained_roles():
        yield TimedPhase(scoring_phase(role), teach() if kind_of(role) == "teacher" else forward())
        return
    if role == "critic":
        yield TimedPhase("values", forward())
    elif needs_old_log_probs(config):
        yield TimedPhase("old log-probs", forward())
    if role == "actor" and has_reference(config):
        yield TimedPhase("reference", forward())
    if role == "actor" and teaches_itself(config):
        yield TimedPhase("teacher", teach())
    yield TimedPhase(f"train {role}", _work(subject, role, lengths, trains=True))


# --- generation -----------------------------------------------------------------------------------------------------


def rollout_phase(subject: PlanInput, lengths: Lengths) -> TimedPhase:
    """Return the engines' work until the longest sample has ended."""
    config, spec, device = subject.config, subject.specs["actor"], subject.hardware
    engine = engine_memory(config, spec, device)
    # Data-parallel ranks have their own samples, as engines do.
    engines, size = num_engines(config) * config.rollout.dp, config.rollout.tp * config.rollout.pp
    samples = samples_per_step(config.batch) / engines
    fits_whole = samples <= engine.num_held(lengths.whole)
    batch = max(1.0, min(samples, math.inf if fits_whole else rows_by_cache(engine, lengths), engine.max_sequences))
    step_s, context = decode_step(subject, engine), lengths.prompt + lengths.response / 2
    # The last remaining samples run a few at a time, until the longest has ended.
    tail_tokens = max(0.0, config.rollout.max_response_tokens - lengths.response)
    tail_s = step_s(max(1.0, ASSUMPTIONS.tail_share * batch), context)
    prompts, flops = samples, spec.sequence_flops(math.ceil(lengths.prompt))
    if config.rollout.vllm.get("enable_prefix_caching") is not False:
        prompts /= config.batch.samples_per_prompt
    prompt_s = flops / (size * device.flops_per_s * ASSUMPTIONS.prefill_efficiency)
    parts = {
        "prefill": prompts * (prompt_s + lengths.prompt * engine_link_s(subject)),
        "decoding": samples * lengths.response / batch * step_s(batch, context),
        "the longest": tail_tokens * tail_s,
    }
    return TimedPhase("rollout", parts)


def node_link_bytes_per_s(subject: PlanInput) -> float:
    """Return the bandwidth of sums over the tensor ranks of an engine over several nodes. All network cards of a node
    carry them, as fast as one device can send inside of the node."""
    device, here = subject.hardware, subject.config.cluster.devices_per_node
    return min(device.link_bytes_per_s, here * device.network_bytes_per_s) * ASSUMPTIONS.link_efficiency


def engine_link_s(subject: PlanInput) -> float:
    """Return the seconds per token of messages inside an engine: tensor ranks over several nodes add up hidden states,
    twice per layer, and a stage sends them to the next. Within a node, sums are a part of the launches."""
    config, spec, tp, pp = subject.config, subject.specs["actor"], subject.config.rollout.tp, subject.config.rollout.pp
    hidden = ITEM_BYTES[config.rollout.vllm.get("dtype", config.actor.dtype)] * spec.hidden
    seconds = 0.0
    if tp > config.cluster.devices_per_node:
        seconds = spec.num_layers / pp * 2 * 2 * hidden * (tp - 1) / tp / node_link_bytes_per_s(subject)
    if spec.moe and config.rollout.dp > 1:  # each rank gets the tokens of all ranks for its experts, and returns sums
        routed = sum(map(spec.has_experts, range(spec.num_layers)))
        seconds += routed * 2 * hidden * (config.rollout.dp - 1) * _s_per_byte(subject, config.rollout.dp)
    # Stages send at the same time, each the hidden states and the sum of the layers before.
    return seconds + (2 * hidden * _s_per_byte(subject, config.rollout.num_devices) if pp > 1 else 0.0)


def rows_by_cache(engine: EngineMemory, lengths: Lengths) -> float:
    """Return how many samples fit into an engine's cache if the running samples are half grown on average."""
    return engine.num_held(lengths.prompt + lengths.response / 2)


def decode_step(subject: PlanInput, engine: EngineMemory) -> Callable[[float, float], float]:
    """Return a function of batch size and context that gives the seconds of one token for each sample. The GPU reads
    weights and cache, multiplies and launches, or waits for the host, which schedules every sample.

    Each of several stages has another part of the samples at a time. All of them read their weights for each part, and
    every sample has a new token when each part has been in every stage.
    """
    spec, device = subject.specs["actor"], subject.hardware
    tp, pp = subject.config.rollout.tp, subject.config.rollout.pp
    weights = next(size for name, size, _ in engine.parts if name == "weights")
    experts, untouched = 0.0, 0.0
    if spec.moe:
        num_routed = sum(map(spec.has_experts, range(spec.num_layers)))
        elements = num_routed * spec.moe.num_experts * 3 * spec.hidden * spec.moe.expert_ffn
        experts = elements / spec.num_parameters * weights
        untouched = 1 - spec.moe.experts_per_token / spec.moe.num_experts
    bytes_per_s = device.memory_bytes_per_s * ASSUMPTIONS.decode_bandwidth
    flops_per_s = tp * pp * device.flops_per_s * ASSUMPTIONS.prefill_efficiency
    token_flops, pair_flops = spec.flops_per_token, spec.decode_flops_per_token_pair
    waits = 1 if tp == 1 else 2 if tp <= subject.config.cluster.devices_per_node else 4
    launches_s = spec.num_layers * ASSUMPTIONS.decode_layer_s * waits + pp * ASSUMPTIONS.decode_step_s
    link_s = engine_link_s(subject)

    def seconds(batch: float, context: float) -> float:
        cached = context * engine.token_bytes + engine.state_bytes
        part = max(1.0, batch / pp) * subject.config.rollout.dp
        read_s = (pp * (weights - math.pow(untouched, part) * experts) + batch * cached) / bytes_per_s
        compute_s = batch * (token_flops + pair_flops * mean_visible(spec, context)) / flops_per_s
        return max(max(read_s, compute_s) + launches_s + batch * link_s, batch * ASSUMPTIONS.decode_sample_s)

    return seconds


# --- training -------------------------------------------------------------------------------------------------------


def _work(subject: PlanInput, role: str, lengths: Lengths, *, trains: bool) -> dict[str, float]:
    """Return the seconds of a forward pass, or of forward, backward and optimizer steps, for all samples of a step."""
    config, spec, device = subject.config, subject.specs[role], subject.hardware
    model, mesh = config.model_roles()[role], role_mesh(config, role)
    num_updates = updates_per_step(config.batch) if trains else 1
    samples = samples_per_step(config.batch) * (config.batch.epochs_per_step if trains else 1)
    # Backward is twice the work of forward, and recomputation adds forward work again.
    passes = 3 + _recomputed_share(spec, model) if trains else 1
    tokens, room = samples * lengths.whole, model.max_tokens_per_device * mesh.cp
    per_update = max(1, math.ceil(tokens / num_updates / mesh.dp / room))
    flops = passes * samples * spec.sequence_flops(math.ceil(lengths.whole))
    if trains and (lora := config.trained_roles()[role].lora):  # frozen weights have no gradients
        flops += tokens * (passes * adapter_flops_per_token(spec, lora) - spec.flops_per_token)
    parts = {
        "matrix products": flops / (mesh.world_size * device.flops_per_s * ASSUMPTIONS.train_efficiency),
        "launches": passes * per_update * num_updates * _layer_launches_s(subject, role) / mesh.pp,
        "links": passes * tokens / (mesh.dp * mesh.cp) * _link_s_per_token(subject, role, mesh) / mesh.pp,
    }
    if model.strategy == "fsdp":
        exchanged = exchanged_bytes(spec, model, mesh, trains=trains)
        seconds = exchanged * _s_per_byte(subject, model.fsdp.shard_size or mesh.world_size)
        if trains:
            seconds += copied_bytes(spec, model, mesh) * _s_per_byte(subject, mesh.world_size)
        parts["whole weights and gradients"] = per_update * num_updates * seconds
        return parts
    parts["pipeline bubble"] = (mesh.pp - 1) / (per_update * model.parallel.vpp) * sum(parts.values())
    if trains:
        parts["gradients and weights over the ranks"] = num_updates * _reduction_s(subject, role, mesh)
    return parts


def _recomputed_share(spec: ModelSpec, model: MegatronModelConfig) -> float:
    """Return the share of a forward pass that is recomputed in backward."""
    if model.strategy == "fsdp":
        return 1.0 if model.fsdp.recompute else 0.0
    granularity = model.megatron.get("recompute_granularity")
    if granularity == "selective":
        return spec.mlp_share if {"mlp", "moe"} & set(model.megatron.get("recompute_modules") or ()) else 0.0
    return 1.0 if granularity == "full" else 0.0


def _layer_launches_s(subject: PlanInput, role: str) -> float:
    spec, model = subject.specs[role], subject.config.model_roles()[role]
    num_routed, expert_s = sum(map(spec.has_experts, range(spec.num_layers))), ASSUMPTIONS.expert_layer_s
    if spec.moe and not model.megatron.get("moe_grouped_gemm"):
        expert_s += spec.moe.num_experts / model.parallel.ep * ASSUMPTIONS.lone_expert_s
    return (spec.num_layers - num_routed) * ASSUMPTIONS.train_layer_s + num_routed * expert_s


def _link_s_per_token(subject: PlanInput, role: str, mesh: Mesh) -> float:
    """Return the communication seconds of one token forward through all layers: tensor ranks gather and reduce, context
    ranks exchange keys and values, stages send hidden states, and experts receive and return tokens."""
    spec, model = subject.specs[role], subject.config.model_roles()[role]
    hidden = ITEM_BYTES[model.dtype] * spec.hidden
    keys_and_values = ITEM_BYTES[model.dtype] * spec.num_kv_heads * (spec.head_dim + spec.v_dim)
    tensor = 4 * hidden * (mesh.tp - 1) / mesh.tp * _s_per_byte(subject, mesh.tp)
    context = keys_and_values / mesh.tp * (mesh.cp - 1) * _s_per_byte(subject, mesh.tp * mesh.cp)
    stages = 0.0
    if mesh.pp > 1:
        sent = model.parallel.vpp * hidden / (mesh.tp if model.parallel.sequence_parallel else 1)
        stages = mesh.pp * sent * _s_per_byte(subject, mesh.world_size)
    total = spec.num_layers * (tensor + context) + stages
    if not spec.moe:
        return total
    num_routed = sum(map(spec.has_experts, range(spec.num_layers)))
    sent = 2 * spec.moe.experts_per_token * hidden * (mesh.ep - 1) / mesh.ep / mesh.tp
    return total + num_routed * sent * _s_per_byte(subject, mesh.ep * mesh.etp)


def _s_per_byte(subject: PlanInput, span: int) -> float:
    """Return the seconds per byte among `span` neighboring devices. Within a machine, no network is needed."""
    device, outside = subject.hardware, max(0, span - subject.config.cluster.devices_per_node) / span
    through = outside / device.network_bytes_per_s + (1 - outside) / device.link_bytes_per_s
    return through / ASSUMPTIONS.link_efficiency


def _reduction_s(subject: PlanInput, role: str, mesh: Mesh) -> float:
    """Return the seconds of one update: reduction of gradients in float32 to their owners, and return of the
    weights."""
    model = subject.config.trained_roles()[role]
    rank_buffers = buffers(subject.specs[role], model, mesh, head_of(subject.config, role), 0)
    moved = sum(buffer.num_padded * (1 - 1 / buffer.num_owners) for buffer in rank_buffers) * (
        4 + ITEM_BYTES[model.dtype]
    )
    return moved * _s_per_byte(subject, mesh.world_size // mesh.pp)


# --- weights --------------------------------------------------------------------------------------------------------


def _weights(subject: PlanInput) -> dict[str, float]:
    """Return the seconds of sending weights into the engines, and of moving the trainer's memory to the host and
    back."""
    config, device, spec = subject.config, subject.hardware, subject.specs["actor"]
    model, mesh = config.actor, role_mesh(config, "actor")
    dtype = config.rollout.vllm.get("dtype", model.dtype)
    if gets_adapters_only(config):
        assert model.lora is not None, "engines get the adapters of a model that has some"
        elements = sum(map(math.prod, adapter_tensors(spec, model.lora).values()))
        return {
            "adapters": elements * ITEM_BYTES[model.dtype] / device.network_bytes_per_s / ASSUMPTIONS.link_efficiency
        }
    if has_own_rollout_pool(config):
        num_bytes = handed_over(spec, sent_sizes(config, spec), dtype)[0] / ASSUMPTIONS.link_efficiency
        senders = min(1.0, mesh.world_size / (num_engines(config) * config.rollout.num_devices))
        return {"reshard": num_bytes / device.network_bytes_per_s / senders}
    traffic = busiest_traffic(config, spec)
    inside, outside = traffic.link / device.link_bytes_per_s, traffic.network / device.network_bytes_per_s
    parts = {"reshard": max(inside, outside) / ASSUMPTIONS.link_efficiency}
    if config.sync.offload:
        held = role_weights(spec, model, mesh, "lm", 0)
        parts["to the host and back"] = 2 * (held.parameters + held.optimizer) / device.host_bytes_per_s
    return parts
