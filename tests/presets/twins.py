"""Small twins of the presets for a laptop: the same family, switches and kinds of parallelism, reduced sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
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


@cache
def presets() -> dict[str, AnyConfig]:
    """Return the configuration of each preset by its file name."""
    return {path.stem: load_any_config(str(path)).config for path in sorted(CONFIGS.glob("*.yaml"))}


def cut(parallel: ParallelConfig) -> ParallelConfig:
    """Return the same kinds of parallelism, each of size at most 2."""
    sizes = {field.name: getattr(parallel, field.name) for field in fields(parallel)}
    return replace(parallel, **{name: min(size, MAX_SIZE) for name, size in sizes.items() if size and size is not True})


@dataclass(frozen=True)
class TrainingTwin:
    """A role of a preset, to train and compare with a plain run on one rank."""

    values: Mapping[str, Any]
    """The `config.json` of a small model of its family."""
    head: Head
    settings: MegatronModelConfig
    num_ranks: int


def training_twins() -> dict[str, TrainingTwin]:
    """Return the twins by name, `preset:role`. Roles that only differ in sizes share the twin of the first."""
    twins: dict[str, TrainingTwin] = {}
    for preset, config in presets().items():
        for role in config.model_roles():
            twin = training_twin(config, role)
            if twin not in twins.values():
                twins[f"{preset}:{role}"] = twin
    return twins


def training_twin(config: AnyConfig, role: str) -> TrainingTwin:
    """Return the twin of a role, without the settings that `verify_layout` chooses itself."""
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
    """Return the keys that are passed on to Megatron."""
    sections = (getattr(settings, name, {}) for name in ("megatron", "ddp", "optimizer"))
    return {name for section in sections for name in section}
