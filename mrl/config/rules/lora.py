"""Rules for the section `lora` of trained roles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from operator import attrgetter

from mrl.config.lora import ALL_LINEAR, MAX_ENGINE_RANK, REFUSED_TARGETS, TARGETS, LoraConfig
from mrl.config.peft_settings import read_peft_settings
from mrl.config.rules.problems import problem
from mrl.config.schema import Config
from mrl.config.sft import AnyConfig
from mrl.errors import ModelError, Problem, did_you_mean

_LORA_OF_BASE = ("lora.base_quantization",)
"""Settings of adapters that belong to the frozen model."""


def check_lora(config: AnyConfig) -> Iterator[Problem]:
    for role, model in config.trained_roles().items():
        if model.lora is None:
            continue
        key = f"{role}.lora"
        yield from _targets(f"{key}.targets", model.lora)
        if model.lora.base == "actor":
            yield from _base_of_actor(config, role)
        if model.lora.base_quantization is not None:
            yield from _quantized(config, role)
        if model.lora.path is not None:
            yield from _first_adapters(role, model.lora.path, model.lora, config.model_of(role)[1])
        if isinstance(config, Config) and role == "actor" and model.lora.sync == "adapters":
            yield from _engines(config, model.lora.rank)


def _first_adapters(role: str, path: str, lora: LoraConfig, model: str) -> Iterator[Problem]:
    """Compare the section with the files that the adapters start from."""
    try:
        settings = read_peft_settings(path)
    except ModelError as error:
        yield problem(f"{role}.lora.path", f"{error.where} {error.what}", error.fix)
        return
    yield from (problem(*difference) for difference in settings.differences(role, lora, model))


def _quantized(config: AnyConfig, role: str) -> Iterator[Problem]:
    """Refuse engines that would quantize a frozen model in FP8 again, with other scales."""
    if not isinstance(config, Config) or role != "actor":
        return
    for name in ("quantization", "quantization_config"):
        if config.rollout.vllm.get(name):
            what = "vLLM would quantize the frozen model again, with other scales than actor.lora.base_quantization"
            fix = f"remove rollout.vllm.{name}, or actor.lora.base_quantization"
            yield problem(f"rollout.vllm.{name}", what, fix)


def _base_of_actor(config: AnyConfig, role: str) -> Iterator[Problem]:
    """Refuse a critic on the actor's frozen model if the two need different processes or different models."""
    key, own = f"{role}.lora.base", f"{role}.lora.base=own"
    if not isinstance(config, Config) or role != "critic" or config.critic is None:
        yield problem(key, "only a critic can use the actor's frozen model", own)
        return
    actor, critic, places = config.actor, config.critic, config.placement.roles
    if actor.lora is None:
        yield problem(key, "the actor trains all its weights, so it has no frozen model", f"{own}, or set actor.lora")
    if config.model.critic not in (None, config.model.path):
        yield problem(key, f"model.critic is {config.model.critic}, but the actor's is {config.model.path}", own)
    if critic.lora is not None and critic.lora.path is not None:
        yield problem("critic.lora.path", "PEFT's files have no score head for a critic on the actor's model", own)
    if places["critic"] != places["actor"]:
        what = f"the critic is in the pool {places['critic']}, and the actor in {places['actor']}"
        yield problem(key, what, f"placement.roles.critic={places['actor']}")
    axes = [f"parallel.{axis.name}" for axis in fields(critic.parallel)]
    for name in ("strategy", "dtype", "megatron", *_LORA_OF_BASE, *axes):
        if name in _LORA_OF_BASE and actor.lora is None:
            continue
        mine, other = (attrgetter(name)(model) for model in (critic, actor))
        if mine != other:
            what = f"{mine}, but the shared model has actor.{name}={other}"
            yield problem(f"critic.{name}", what, f"critic.{name}={other}, or {own}")
    for name, model in (("actor", actor), ("critic", critic)):
        if model.worker is not None:
            yield problem(f"{name}.worker", "a shared model needs mrl's own workers", f"{name}.worker=null, or {own}")
        if model.ddp.get("overlap_param_gather"):
            what = "each role would wait for the other's parameters"
            yield problem(f"{name}.ddp.overlap_param_gather", what, f"remove this key, or {own}")


def check_lora_targets(config: AnyConfig, role: str, num_experts: int | None, kind: str | None) -> Iterator[Problem]:
    """Refuse adapters of modules that cannot have any yet, and engines that cannot apply them."""
    model = config.trained_roles().get(role)
    if model is None or model.lora is None:
        return
    has_expert_adapters = num_experts is not None and model.lora.has_expert_targets and kind != "gpt-oss"
    if isinstance(config, Config) and role == "actor" and model.lora.sync == "adapters":
        reasons = [f"in vLLM, adapters of {kind} have not been compared with the trainer's yet"] if kind else []
        if has_expert_adapters:
            reasons.append("in vLLM, adapters of experts have not been compared with the trainer's yet")
        if num_experts is not None and config.cluster.device == "cpu":
            reasons.append("on a CPU, vLLM applies no adapters in a model with experts")
        yield from (problem(f"{role}.lora.sync", reason, f"{role}.lora.sync=merged") for reason in reasons[:1])
    if has_expert_adapters and model.strategy == "fsdp":
        what = "strategy=fsdp takes the experts of a layer as one tensor, which cannot have adapters yet"
        fix = f"{role}.lora.targets with modules of the attention only, such as o_proj, or {role}.strategy=megatron"
        yield problem(f"{role}.lora.targets", what, fix)
    if num_experts is not None and model.lora.base == "actor":
        what = "routers of a model with experts count the tokens of one role only"
        yield problem(f"{role}.lora.base", what, f"{role}.lora.base=own")
    if num_experts is not None and model.lora.base_quantization and model.megatron.get("moe_grouped_gemm"):
        what = f"experts in FP8 are multiplied one by one, and {role}.lora.base_quantization is set"
        yield problem(f"{role}.megatron.moe_grouped_gemm", what, "remove this key")


def _engines(config: Config, rank: int) -> Iterator[Problem]:
    """Check that the engines can apply the adapters."""
    key, merged = "actor.lora.sync", "actor.lora.sync=merged"
    if config.rollout.engine != "vllm":
        yield problem(key, f"only vllm applies adapters, not the engine {config.rollout.engine}", merged)
    if rank > MAX_ENGINE_RANK:
        what = f"vLLM applies adapters up to rank {MAX_ENGINE_RANK}, not {rank}"
        yield problem(key, what, f"{merged}, or actor.lora.rank={MAX_ENGINE_RANK}")


def _targets(key: str, lora: LoraConfig) -> Iterator[Problem]:
    if not lora.targets:
        yield problem(key, "no module is a target, so nothing would be trained", f"{key}=[{ALL_LINEAR}]")
    for name in dict.fromkeys(lora.targets):
        if name in REFUSED_TARGETS:
            yield problem(key, f"{name} is refused: {REFUSED_TARGETS[name]}", "remove it")
        elif name not in (ALL_LINEAR, *TARGETS):
            yield problem(key, f'unknown module "{name}"', did_you_mean(name, (ALL_LINEAR, *TARGETS)))
    if ALL_LINEAR in lora.targets and len(lora.targets) > 1:
        yield problem(key, f"{ALL_LINEAR} includes every other target", f"{key}=[{ALL_LINEAR}]")
