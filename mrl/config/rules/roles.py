"""Rules for the sections of roles that Megatron runs: layout, schedule, optimizer, micro-batches."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mrl.config.arithmetic import (
    longest_sample_tokens,
    longest_teacher_tokens,
    reads_reference,
    teaches_itself,
    tokens_limit,
)
from mrl.config.role_kinds import kind_of
from mrl.config.rules.cluster import placed
from mrl.config.rules.problems import near_multiples, nearest, problem, stays_in_a_node
from mrl.config.schema import Config
from mrl.config.sft import AnyConfig, RankedConfig
from mrl.errors import Problem


def check_roles(config: AnyConfig) -> Iterator[Problem]:
    yield from _layouts(config)
    yield from _learning_rates(config)
    if isinstance(config, Config):
        yield from _micro_batches(config)
        yield from _unread(config)
    elif isinstance(config, RankedConfig) and config.is_of_pairs():
        yield from _pairs(config)


def _layouts(config: AnyConfig) -> Iterator[Problem]:
    """Check that a role's devices are a multiple of its layouts' sizes, and that settings of an axis have that axis."""
    for role, devices in placed(config):
        at, pool = config.model_roles()[role].parallel, config.placement.roles[role]
        for formula, size in (("tp x cp x pp", at.tp * at.cp * at.pp), ("etp x ep x pp", at.etp * at.ep * at.pp)):
            if devices % size:
                what = f'{formula} = {size} does not divide the {devices} devices of pool "{pool}"'
                fix = nearest(f"placement.pools.{pool}", near_multiples(devices, size))
                yield problem(f"{role}.parallel", what, fix)
        if isinstance(config, Config):
            here = config.cluster.devices_per_node
            yield from stays_in_a_node(f"{role}.parallel.tp", at.tp, devices, here)
    for role, model in config.model_roles().items():
        at, key = model.parallel, f"{role}.parallel"
        if at.sequence_parallel and at.tp == 1:
            fix = f"{key}.sequence_parallel=false, or {key}.tp=2"
            yield problem(f"{key}.sequence_parallel", "needs tensor parallelism, but tp is 1", fix)
        if at.vpp > 1 and at.pp == 1:
            what = f"{at.vpp} chunks per stage need a pipeline, but pp is 1"
            yield problem(f"{key}.vpp", what, f"{key}.vpp=1, or {key}.pp=2")
        for end in ("first_stage_layers", "last_stage_layers"):
            if getattr(at, end) and at.pp == 1:
                yield problem(f"{key}.{end}", "needs a pipeline, but pp is 1", f"{key}.{end}=null, or {key}.pp=2")


def _learning_rates(config: AnyConfig) -> Iterator[Problem]:
    """Check that a decay ends after its warm-up, and that optimizer values are valid."""
    for role, model in config.trained_roles().items():
        schedule, key = model.schedule, f"{role}.schedule.decay_steps"
        if schedule.decay != "constant" and schedule.decay_steps is None:
            yield problem(key, f"decay is {schedule.decay}, but its end is not set", f"{key}=1000")
        elif schedule.decay_steps is not None and schedule.decay_steps <= schedule.warmup_steps:
            what = f"{schedule.decay_steps} updates include a warm-up of {schedule.warmup_steps}"
            yield problem(key, what, f"at least {key}={schedule.warmup_steps + 1}")
    for role, model in config.trained_roles().items():
        for name, value in model.optimizer.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            limit, words = math.inf, "finite, and at least 0"
            if "beta" in name:
                limit, words = 1, "from 0 to less than 1"
            if is_number and not 0 <= value < limit:
                yield problem(f"{role}.optimizer.{name}", f"must be {words}, not {value:g}")


def _micro_batches(config: Config) -> Iterator[Problem]:
    """Check that the longest sample fits into one micro-batch."""
    rollout, longest = config.rollout, longest_sample_tokens(config.rollout)
    lengths = f"max_prompt_tokens + max_response_tokens = {rollout.max_prompt_tokens} + {rollout.max_response_tokens}"
    for role, model in config.model_roles().items():
        limit, cp, key = model.max_tokens_per_device, model.parallel.cp, f"{role}.max_tokens_per_device"
        if longest > limit * cp:
            what = f"a sample of {lengths} = {longest} does not fit in {_room_of(limit, cp)}"
            yield problem(key, what, f"smallest: {key}={math.ceil(longest / cp)}")
        is_teacher = kind_of(role) == "teacher" or (role == "actor" and teaches_itself(config))
        if is_teacher and longest <= limit * cp < (taught := longest_teacher_tokens(config)):
            what = f"a sample with the teacher's prompt, context_tokens + max_response_tokens = {taught}, does not fit"
            yield problem(key, f"{what} in {_room_of(limit, cp)}", f"smallest: {key}={math.ceil(taught / cp)}")


def _pairs(config: RankedConfig) -> Iterator[Problem]:
    """Check that the longest pair fits into one micro-batch. Both of its responses repeat the prompt."""
    batch, limit, cp = config.batch, config.actor.max_tokens_per_device, config.actor.parallel.cp
    if (longest := tokens_limit(config)) > limit * cp:
        lengths, key = f"{batch.max_prompt_tokens} + {batch.max_response_tokens}", "actor.max_tokens_per_device"
        what = f"a pair of 2 x (max_prompt_tokens + max_response_tokens) = 2 x ({lengths}) = {longest} does not fit"
        yield problem(key, f"{what} in {_room_of(limit, cp)}", f"smallest: {key}={math.ceil(longest / cp)}")


def _room_of(limit: int, cp: int) -> str:
    return f"{limit} x cp {cp} = {limit * cp}" if cp > 1 else str(limit)


def _unread(config: Config) -> Iterator[Problem]:
    """Yield the models that nothing reads."""
    advantage = config.algorithm.advantage
    if config.critic is not None and advantage != "gae" and ":" not in advantage:
        what = f"{advantage} does not read a critic's values"
        yield problem("critic", what, "critic=null, or algorithm.advantage=gae")
    if config.reference is not None and not reads_reference(config.algorithm):
        what = "algorithm.kl.where is none: nothing reads the reference model"
        fix = "algorithm.kl.where=loss, or placement.roles.reference=null and reference=null"
        yield problem("reference", what, fix)
    if config.algorithm.distillation is None:
        for role in config.teaching_models():
            what, fix = "nothing is learned from it", f"algorithm.distillation.form=top_k, or {role}=null"
            yield problem(role, what, fix)
