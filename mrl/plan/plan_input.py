"""The input of a plan: a configuration, the models of its roles, and the devices; and variations of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar, cast

from mrl.config.hardware import DEFAULT, Hardware, hardware
from mrl.config.resolved.load import AnyTyped, Resolved
from mrl.config.rules.check import check_sizes
from mrl.config.rules.fsdp import check_fsdp
from mrl.config.rules.model_shape import ModelShape, check_model_rules
from mrl.config.schema import Config, TrainedModelConfig
from mrl.config.sft import AnyConfig
from mrl.errors import ConfigError, ModelError, Problem
from mrl.models.adapters import check_sharded_targets
from mrl.models.families import FAMILIES
from mrl.models.layout import check_layout
from mrl.models.megatron_arguments import fused_kernels
from mrl.models.open_model import require_table
from mrl.models.rollout_table import EngineSizes
from mrl.models.spec import ModelSpec
from mrl.plan.known_models import model_spec
from mrl.rollout.quantization import has_known_cache, is_online_fp8

AnyNode = TypeVar("AnyNode")


@dataclass(frozen=True)
class Planned(Generic[AnyTyped]):
    """A configuration with everything else that a plan needs."""

    config: AnyTyped
    specs: dict[str, ModelSpec]
    """Model of each role."""
    hardware: Hardware

    def problems(self) -> Iterator[Problem]:
        yield from check_sizes(self.config)
        yield from check_fsdp(self.config)
        for role, spec in self.specs.items():
            num_experts = spec.moe.num_experts if spec.moe else None
            heads = (spec.num_heads, spec.num_kv_heads)
            shape = ModelShape(
                spec.num_layers,
                *heads,
                num_experts,
                window=spec.sliding_window,
                family=spec.family,
                latent=spec.mla.kv_rank if spec.mla else None,
                delta_heads=spec.gdn.key_heads if spec.gdn else None,
                expert_ffn=spec.moe.expert_ffn if spec.moe else None,
            )
            yield from check_model_rules(self.config, [role], shape)

    def check_layouts(self) -> None:
        """Raise an error for layouts that the tables do not support."""
        for role, spec in self.specs.items():
            model = self.config.model_roles()[role]
            if model.strategy == "megatron":
                require_table(spec, role, FAMILIES)
            elif isinstance(model, TrainedModelConfig) and model.lora is not None:
                check_sharded_targets(spec, model.lora)
            check_layout(model.parallel, spec)
        if isinstance(self.config, Config):
            EngineSizes.of(self.config.rollout, self.specs["actor"]).check(self.specs["actor"])

    def with_changes(self, changes: Mapping[str, Any]) -> Self | None:
        """Return a copy with these dotted keys changed, or None if a rule or the model forbids it."""
        subject = self.with_changes_unchecked(changes)
        if next(subject.problems(), None) is not None:
            return None
        try:
            subject.check_layouts()
        except ModelError:
            return None
        return subject

    def with_changes_unchecked(self, changes: Mapping[str, Any]) -> Self:
        """Return a copy with these dotted keys changed, without any checks."""
        config = self.config
        for key, value in changes.items():
            config = _replaced(config, key.split("."), value)
        return dataclasses.replace(self, config=config)

    def overrides(self, changes: Mapping[str, Any]) -> str:
        """Return changes as command-line overrides, without redundant ones."""
        words = []
        for key, value in changes.items():
            present = _value(self.config, key.split("."))
            if isinstance(value, dict):
                removed = dict.fromkeys(present or {})
                pairs = ", ".join(f"{name}: {_yaml(entry)}" for name, entry in {**removed, **value}.items())
                words += [f'"{key}={{{pairs}}}"'] if value != present else []
            # a reference value may be inherited from a key that changes
            elif value != present or key.startswith("reference."):
                words.append(f"{key}={_yaml(value)}")
        return " ".join(words)


PlanInput = Planned[Config]


def make_plan_input(
    resolved: Resolved[AnyTyped], hardware_name: str | None, model: str | None = None
) -> Planned[AnyTyped]:
    """Return the input of a plan, for these devices or those of the configuration. `model` sets the sizes if
    `model.path` does not give them. Kernels are fused, as on GPUs with Transformer Engine."""
    config = resolved.config
    if config.cluster.device != "gpu":
        wrong = Problem("", "cluster.device", "plans are for GPUs, not CPU slots", "cluster.device=gpu")
        raise ConfigError([resolved.located(wrong)])
    specs = model_specs(config, model)
    device = hardware(hardware_name or config.cluster.hardware or DEFAULT)
    roles = config.model_roles().items()
    fused = {
        f"{role}.megatron": fused_kernels(specs[role], getattr(model, "lora", None)) | model.megatron
        for role, model in roles
        if model.strategy == "megatron"
    }
    subject = Planned(config, specs, device).with_changes_unchecked(fused)
    if problems := list(subject.problems()):
        raise ConfigError([resolved.located(problem) for problem in problems])
    subject.check_layouts()
    return subject


def not_modeled(config: Config) -> Iterator[str]:
    """Yield settings that change memory or time but are not modeled."""
    options = config.rollout.vllm
    unknown = {
        "quantization": not is_online_fp8(options),
        "quantization_config": True,
        "enable_expert_parallel": True,
        "kv_cache_dtype": not has_known_cache(options),
    }
    yield from (f"rollout.vllm.{name}" for name, is_unknown in unknown.items() if is_unknown and options.get(name))
    if config.judge is not None:
        yield "judge"  # it has its own devices, and its model may be of an unknown family


def model_specs(config: AnyConfig, model: str | None) -> dict[str, ModelSpec]:
    return {role: model_spec(model or config.model_of(role)[1]) for role in config.model_roles()}


def _replaced(node: AnyNode, path: Sequence[str], value: Any) -> AnyNode:
    """Return a copy of a dataclass or dictionary with a new value at the end of the path."""
    name, *rest = path
    if isinstance(node, dict):
        return cast(AnyNode, {**node, name: _replaced(node[name], rest, value) if rest else value})
    inner = _replaced(getattr(node, name), rest, value) if rest else value
    return cast(AnyNode, dataclasses.replace(cast(Any, node), **{name: inner}))


def _value(node: Any, path: Sequence[str]) -> Any:
    for name in path:
        node = node.get(name) if isinstance(node, dict) else getattr(node, name)
    return node


def _yaml(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
