"""Rules for `ROLE.strategy`: what torch's sharding cannot do, and settings that the other strategy would not read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from mrl.config.arithmetic import role_devices
from mrl.config.fsdp import OPTIMIZER_DEFAULTS, FsdpConfig
from mrl.config.lora import LoraConfig
from mrl.config.rules.problems import nearest, problem
from mrl.config.schema import Config, MegatronModelConfig, ParallelConfig, TrainedModelConfig
from mrl.config.sft import AnyConfig
from mrl.errors import Problem, did_you_mean

_AXES = {
    "tp": "tensor parallelism",
    "pp": "pipeline stages",
    "vpp": "pipeline stages",
    "ep": "expert parallelism",
    "etp": "expert parallelism",
    "first_stage_layers": "pipeline stages",
    "last_stage_layers": "pipeline stages",
    "sequence_parallel": "tensor parallelism",
}
"""Keys of `parallel` that only Megatron has, with the kind of parallelism."""
UNSUPPORTED = {
    "gpt_oss": "its experts are stored in a separate order, for which there is no conversion yet",
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "kimi_linear"),
        "in transformers, its linear attention runs from one packed row into the next",
    ),
    "bloom": "in transformers, its attention does not take packed rows",
    "llama4_text": "its attention is in chunks, which only a mask knows",
    "gemma2": "it caps its logits, which mrl's head does not",
    "gemma3n_text": "it caps its logits, which mrl's head does not",
}
"""Family -> reason. Others that do not work are refused when they load, by the same measurement."""


def check_fsdp(config: AnyConfig) -> Iterator[Problem]:
    for role, model in config.model_roles().items():
        if model.strategy == "fsdp":
            yield from _layout(config, role, model)
            yield from _settings(config, role, model)
        else:
            yield from _unread(role, model)


def check_fsdp_family(role: str, model: MegatronModelConfig, family: str | None) -> Iterator[Problem]:
    """Refuse families that are known not to work."""
    if model.strategy == "fsdp" and family in UNSUPPORTED:
        what = f"fsdp does not support {family}: {UNSUPPORTED[family]}"
        yield problem(f"{role}.strategy", what, f"{role}.strategy=megatron if the family has a table, or another model")


def _layout(config: AnyConfig, role: str, model: MegatronModelConfig) -> Iterator[Problem]:
    default = ParallelConfig()
    for name, kind in _AXES.items():
        if (value := getattr(model.parallel, name)) != getattr(default, name):
            key, usual = f"{role}.parallel.{name}", getattr(default, name)
            what = f"{value}, but strategy=fsdp has no {kind}, only data and context parallelism (cp)"
            shown = {None: "null", False: "false"}.get(usual, usual)
            yield problem(key, what, f"{key}={shown}, or {role}.strategy=megatron")
    size = model.fsdp.shard_size
    if size is None or role not in config.placement.roles or config.placement.roles[role] not in config.placement.pools:
        return
    devices = role_devices(config, role)
    if devices % size:
        sizes = [number for number in range(1, devices + 1) if devices % number == 0]
        fix = nearest(
            f"{role}.fsdp.shard_size", [n for n in sizes if n <= size][-1:] + [n for n in sizes if n > size][:1]
        )
        yield problem(f"{role}.fsdp.shard_size", f"{size} does not divide the {devices} devices of {role}", fix)


def _settings(config: AnyConfig, role: str, model: MegatronModelConfig) -> Iterator[Problem]:
    for section in ("megatron", "ddp"):
        for name, value in getattr(model, section, {}).items():
            key = f"{role}.{section}.{name}"
            hint = f", and {role}.fsdp.recompute=true" if name.startswith("recompute") else ""
            if value is not None:  # null removes a key of a file that this one extends
                yield problem(key, "strategy=fsdp does not run Megatron", f"{key}=null{hint}")
    if not isinstance(model, TrainedModelConfig):
        return
    known = ("lr", *OPTIMIZER_DEFAULTS)
    for name, value in model.optimizer.items():
        key = f"{role}.optimizer.{name}"
        if name not in known:
            yield problem(key, "the optimizer of strategy=fsdp has no such setting", did_you_mean(name, known))
        elif isinstance(value, bool) or not isinstance(value, int | float):
            yield problem(key, f"must be a number, not {value}")
    if "lr" not in model.optimizer:
        yield problem(f"{role}.optimizer.lr", "is missing: there is no default learning rate", "set it")
    if model.lora is not None:
        yield from _adapters(f"{role}.lora", role, model.lora)
    if model.router_bias_update_rate:
        key = f"{role}.router_bias_update_rate"
        what = f"{model.router_bias_update_rate:g}, but strategy=fsdp leaves the biases of routers unchanged"
        yield problem(key, what, f"{key}=0, or {role}.strategy=megatron")
    if isinstance(config, Config) and role == "actor" and config.algorithm.router_replay != "none":
        what = f"{config.algorithm.router_replay}, but strategy=fsdp cannot give tokens the experts of another pass"
        yield problem("algorithm.router_replay", what, "algorithm.router_replay=none, or actor.strategy=megatron")


def _adapters(key: str, role: str, lora: LoraConfig) -> Iterator[Problem]:
    if lora.base == "actor":
        what = "strategy=fsdp shards each role's own model, so no two roles can share one"
        yield problem(f"{key}.base", what, f"{key}.base=own, or strategy=megatron for both roles")
    if lora.base_quantization is not None:
        what = f"{lora.base_quantization}, but strategy=fsdp cannot keep a frozen model in FP8"
        yield problem(f"{key}.base_quantization", what, f"{key}.base_quantization=null, or {role}.strategy=megatron")


def _unread(role: str, model: MegatronModelConfig) -> Iterator[Problem]:
    for field in dataclasses.fields(FsdpConfig):
        if getattr(model.fsdp, field.name) != field.default:
            key = f"{role}.fsdp.{field.name}"
            yield problem(key, "only strategy=fsdp reads it", f"{role}.strategy=fsdp, or remove this key")
