"""Twins of the presets: the same family, switches and kinds of parallelism, with sizes cut to what a laptop holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from mrl.config.arithmetic import role_mesh
from mrl.config.resolved.load import load_any_config
from mrl.config.schema import MegatronModelConfig, ParallelConfig, ScheduleConfig, TrainedModelConfig
from mrl.config.sft import AnyConfig, RmConfig
from mrl.models.small import small_config
from mrl.models.table import Head
from mrl.plan.known_models import model_values
from mrl.verify.layout import fewest_ranks

CONFIGS = Path(__file__).parents[2] / "configs"
MAX_SIZE = 2


def presets() -> dict[str, AnyConfig]:
    """Every file that a user can start, by its name."""
    return {path.stem: load_any_config(str(path)).config for path in sorted(CONFIGS.glob("*.yaml"))}


def cut(parallel: ParallelConfig) -> ParallelConfig:
    """The same kinds of parallelism, each at most two wide."""
    sizes = {field.name: getattr(parallel, field.name) for field in fields(parallel)}
    return replace(parallel, **{name: min(size, MAX_SIZE) for name, size in sizes.items() if size and size is not True})


@dataclass(frozen=True)
class TrainingTwin:
    """A role of a preset, to be trained beside a plain run of one rank."""

    values: Mapping[str, Any]
    """The `config.json` of a small model of its family."""
    head: Head
    settings: MegatronModelConfig
    num_ranks: int


def training_twins() -> dict[str, TrainingTwin]:
    """Name of each twin, `preset:role`; of roles that differ in sizes alone there is one, named after the first."""
    found: dict[str, TrainingTwin] = {}
    for preset, config in presets().items():
        for role in config.model_roles():
            twin = training_twin(config, role)
            if twin not in found.values():
                found[f"{preset}:{role}"] = twin
    return found


def training_twin(config: AnyConfig, role: str) -> TrainingTwin:
    """What a role becomes, without what `verify_layout` has its own of."""
    settings = config.model_roles()[role]
    parallel = cut(settings.parallel)
    settings = replace(settings, parallel=parallel, max_tokens_per_device=1, dtype="float32")
    if isinstance(settings, TrainedModelConfig):
        settings = replace(settings, schedule=ScheduleConfig())
    num_ranks = fewest_ranks(parallel, min(role_mesh(config, role).dp, MAX_SIZE))
    values = small_config(model_values(config.model_of(role)[1]), parallel)
    is_policy = role in ("actor", "reference", "teacher") and not isinstance(config, RmConfig)
    return TrainingTwin(values, "lm" if is_policy else "score", settings, num_ranks)


def switches(settings: MegatronModelConfig) -> set[str]:
    """The keys that are handed on to Megatron."""
    sections = (getattr(settings, name, {}) for name in ("megatron", "ddp", "optimizer"))
    return {name for section in sections for name in section}
