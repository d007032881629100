"""The models that a configuration names: found before a run begins, and written down so that it goes on with them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mrl import files
from mrl.config.load import AnyTyped, Resolved, rechecked
from mrl.config.run_directory import MODELS_FILE
from mrl.config.schema import Config
from mrl.config.sft import AnyConfig
from mrl.errors import ConfigError, Problem
from mrl.hub import HubName, model_directory


def model_names(config: AnyConfig) -> dict[str, str]:
    """Return key -> what it names, for every model that a role begins with."""
    names = dict(config.model_of(role) for role in config.model_roles())
    if isinstance(config, Config) and config.judge is not None:
        names["judge.path"] = config.judge.path
    return names


def settle_models(resolved: Resolved[AnyTyped]) -> Resolved[AnyTyped]:
    """Find every model that is named, downloaded if need be, and name those of the hub by their commits.

    A run that goes on has the commit that it began with, whatever a branch has come to mean since.
    """
    names, models = {}, {}
    before = _recorded(resolved.config)
    for key, name in model_names(resolved.config).items():
        hub, revision, then = HubName.parse(name), None, before.get(key, {})
        if hub is not None and then.get("name") == name and then.get("revision"):
            hub = HubName(hub.repository, then["revision"])
        directory = model_directory(name if hub is None else str(hub), download=True)
        if hub is not None:
            revision = directory.name
        names[key] = name if hub is None else f"{hub.repository}@{revision}"
        models[key] = {"name": name, "revision": revision, "directory": str(directory)}
    settled = dataclasses.replace(resolved, models=models)
    config = rename_models(resolved.config, names)
    return settled if config == resolved.config else rechecked(settled, config)


def in_directories(config: AnyTyped) -> AnyTyped:
    """Return the same configuration with the directories of its models on this machine in place of their names."""
    return rename_models(config, {key: str(model_directory(name)) for key, name in model_names(config).items()})


def rename_models(config: AnyTyped, names: Mapping[str, str]) -> AnyTyped:
    of_model = {key.removeprefix("model."): name for key, name in names.items() if key.startswith("model.")}
    changes: dict[str, Any] = {"model": dataclasses.replace(config.model, **of_model)}
    if isinstance(config, Config):
        renamed = {
            role: dataclasses.replace(model, path=names.get(f"{role}.path", model.path))
            for role, model in config.scoring_models().items()
        }
        changes["reward_model"] = renamed.pop("reward_model", None)
        changes["reward_models"] = {role.partition(".")[2]: model for role, model in renamed.items()}
        if config.teacher is not None and "teacher.path" in names:
            changes["teacher"] = dataclasses.replace(config.teacher, path=names["teacher.path"])
    if isinstance(config, Config) and config.judge is not None and "judge.path" in names:
        changes["judge"] = dataclasses.replace(config.judge, path=names["judge.path"])
    return dataclasses.replace(config, **changes)


def _recorded(config: AnyConfig) -> dict[str, dict[str, Any]]:
    """Return what the run wrote of its models when it began, where it goes on."""
    file = Path(config.run.dir, config.run.name, MODELS_FILE)
    if config.training.resume != "auto" or not file.is_file():
        return {}
    try:
        models: dict[str, dict[str, Any]] = json.loads(files.read_text(file))
    except (OSError, ValueError) as error:
        what = f"what the run wrote of its models cannot be read: {error}"
        raise ConfigError([Problem(str(file), "run.name", what, "remove the file to look for them anew")]) from error
    return models
