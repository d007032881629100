"""`load_config`: files and overrides in; the typed configuration, or all of its errors at once, out.

`settle_models` finds the models before a run begins, and records them so that a resumed run uses the same ones.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from mrl import files
from mrl.config.keys import convert
from mrl.config.resolved.sources import read_chain, read_overrides
from mrl.config.rules.check import check
from mrl.config.schema import Config
from mrl.config.sft import AnyConfig, DpoConfig, RmConfig, SftConfig
from mrl.config.values import ConfigLayer, KeyPath, Secrets, holds, interpolate, merge
from mrl.errors import ConfigError, Problem
from mrl.hub import HubName, model_directory

AnyTyped = TypeVar("AnyTyped", Config, SftConfig, RmConfig, DpoConfig)
AnyKind = type[Config] | type[SftConfig] | type[RmConfig] | type[DpoConfig]
VERBS: Mapping[AnyKind, str] = {Config: "train", SftConfig: "sft", RmConfig: "rm", DpoConfig: "dpo"}
"""The command that trains with each kind of configuration."""
MODELS_FILE = "models.json"
"""File in the run directory that records the models of the run."""
_FROM_ACTOR = ("parallel", "dtype", "max_tokens_per_device", "megatron")
_EXTRA_SECTIONS = {"rm": "reward", "dpo": "preference"}
"""The section that distinguishes the configuration of a command from that of `mrl sft`."""


@dataclass(frozen=True)
class Resolved(Generic[AnyTyped]):
    """A configuration that passed every check, with the origin of each value."""

    path: str
    config: AnyTyped
    warnings: tuple[str, ...]
    """Checks that were not possible on this machine, with the reason."""
    secrets: Secrets
    _layer: ConfigLayer
    models: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)
    """Key -> `name`, `revision` and `directory` of each model, after `settle_models`."""

    def origin(self, path: KeyPath) -> str:
        """Return `file.yaml:12`, `command line` or `default`."""
        return self._layer.origin(path, "default") if holds(self._layer.values, path) else "default"

    def located(self, problem: Problem) -> Problem:
        return dataclasses.replace(problem, where=self.origin(tuple(problem.key.split("."))))


def load_config(path: str, overrides: Iterable[str] = ()) -> Resolved[Config]:
    """Load a file with `key.path=value` overrides. ConfigError lists everything that is wrong."""
    return _load(Config, path, overrides)


def load_config_of(verb: str, path: str, overrides: Iterable[str] = ()) -> Resolved[Any]:
    """Load the kind of configuration that this command uses."""
    (kind,) = (kind for kind, name in VERBS.items() if name == verb)
    loaded: Resolved[Any] = _load(kind, path, overrides)
    return loaded


def load_any_config(path: str, overrides: Iterable[str] = ()) -> Resolved[Any]:
    """Load a configuration of any kind, recognized by its keys."""
    listed = list(overrides)
    try:
        values = merge(read_chain(path), read_overrides(listed)[0]).values
    except ConfigError:
        values = {}  # `load_config_of` reports the error
    return load_config_of(VERBS[_kind_of(values) or Config], path, listed)


def config_kind(path: str) -> AnyKind | None:
    """Return the kind of configuration in a file, valid or not. Return None if it cannot be recognized."""
    try:
        return _kind_of(read_chain(path).values)
    except ConfigError:
        return None


def _kind_of(values: Mapping[str, Any]) -> AnyKind | None:
    if values.keys() >= {"algorithm", "rollout"}:
        return Config
    batch = values.get("batch")
    if not isinstance(batch, Mapping) or "rows_per_update" not in batch:
        return None
    return DpoConfig if "preference" in values else RmConfig if "reward" in values else SftConfig


def _load(root: type[AnyTyped], path: str, overrides: Iterable[str]) -> Resolved[AnyTyped]:
    listed = list(overrides)
    override_layer, problems = read_overrides(listed)
    try:
        file_layer = read_chain(path)
    except ConfigError as error:
        problems[:0] = error.problems
        raise Secrets().error(problems) from None
    layer = merge(file_layer, override_layer)
    kind = _kind_of(layer.values)
    if kind is not None and VERBS[kind] != VERBS[root]:
        verb = VERBS[kind]
        what = f"this is a configuration of `mrl {verb}`, not of `mrl {VERBS[root]}`"
        missing = _EXTRA_SECTIONS.get(VERBS[root]) if kind is SftConfig else None
        fix = f"mrl {verb} {path}{f', or add the section {missing}' if missing else ''}"
        raise Secrets().error([Problem(path, "", what, fix)])
    values, unresolved, secrets = interpolate(layer, path)
    problems += unresolved

    if root is Config:
        values = _with_reference(values)

    def origin(key: KeyPath) -> str:
        return layer.origin(key, path)

    config, mistakes = convert(root, values, secrets, origin)
    problems += mistakes
    warnings: list[str] = []
    if config is not None and not problems:
        problems, warnings = check(config)
        for key, text in (("run.name", config.run.name), ("run.dir", config.run.dir)):
            if secrets.hide(text) != text:
                what = "contains a secret, which would become the name of a directory"
                problems.append(Problem("", key, what, "choose a name without secrets"))
        problems = [dataclasses.replace(problem, where=origin(tuple(problem.key.split(".")))) for problem in problems]
    if config is None or problems:
        raise secrets.error(problems)
    if config.training.fallback:
        listed += config.training.fallback
        _check_fallback(root, path, listed)
    hidden = tuple(secrets.hide(warning) for warning in warnings)
    return Resolved(path, config, hidden, secrets, ConfigLayer(values, layer.origins))


def _with_reference(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values, with the section of a reference model that has a pool. Keys that it does not set are taken
    from the actor."""
    placement, reference, actor = (values.get(name) for name in ("placement", "reference", "actor"))
    roles = placement.get("roles") if isinstance(placement, dict) else None
    if reference is None and isinstance(roles, dict) and roles.get("reference") is not None:
        reference = {}
    if not isinstance(reference, dict) or not isinstance(actor, dict):
        return values  # no reference model, or the schema reports the error
    own = {name: value for name, value in reference.items() if value is not None}
    of_actor = {name: actor[name] for name in _FROM_ACTOR if name in actor}
    return values | merge(ConfigLayer({"reference": of_actor}), ConfigLayer({"reference": own})).values


def _check_fallback(root: type[AnyTyped], path: str, overrides: Sequence[str]) -> None:
    """Reject a wrong fallback now, not after the loss that it is meant for."""
    try:
        _load(root, path, [*overrides, "training.fallback=[]"])
    except ConfigError as error:
        problems = [dataclasses.replace(problem, where="training.fallback") for problem in error.problems]
        raise ConfigError(problems) from None


def model_names(config: AnyConfig) -> dict[str, str]:
    """Return key -> name of every model that a role starts from."""
    names = dict(config.model_of(role) for role in config.model_roles())
    if isinstance(config, Config) and config.judge is not None:
        names["judge.path"] = config.judge.path
    return names


def settle_models(resolved: Resolved[AnyTyped]) -> Resolved[AnyTyped]:
    """Find every model, download it if necessary, and name models of the hub by their commits.

    A resumed run uses the commit that it began with, even if the branch has moved since.
    """
    names, models = {}, {}
    recorded = _recorded(resolved.config)
    for key, name in model_names(resolved.config).items():
        hub, revision, previous = HubName.parse(name), None, recorded.get(key, {})
        if hub is not None and previous.get("name") == name and previous.get("revision"):
            hub = HubName(hub.repository, previous["revision"])
        directory = model_directory(name if hub is None else str(hub), download=True)
        if hub is not None:
            revision = directory.name
        names[key] = name if hub is None else f"{hub.repository}@{revision}"
        models[key] = {"name": name, "revision": revision, "directory": str(directory)}
    settled = dataclasses.replace(resolved, models=models)
    config = rename_models(resolved.config, names)
    if config == resolved.config:
        return settled
    problems, warnings = check(config)  # apply every rule again, now with the files of the models
    if problems:
        raise resolved.secrets.error(map(resolved.located, problems))
    return dataclasses.replace(settled, config=config, warnings=tuple(map(resolved.secrets.hide, warnings)))


def in_directories(config: AnyTyped) -> AnyTyped:
    """Return the same configuration with the local directories of its models instead of their names."""
    return rename_models(config, {key: str(model_directory(name)) for key, name in model_names(config).items()})


def rename_models(config: AnyTyped, names: Mapping[str, str]) -> AnyTyped:
    of_model: dict[str, Any] = {
        key.removeprefix("model."): name for key, name in names.items() if key.startswith("model.")
    }
    changes: dict[str, Any] = {"model": dataclasses.replace(config.model, **of_model)}
    if isinstance(config, Config):
        renamed = {
            role: dataclasses.replace(model, path=names.get(f"{role}.path", model.path))
            for role, model in config.scoring_models().items()
        }
        changes["reward_model"] = renamed.pop("reward_model", None)
        changes["reward_models"] = {role.partition(".")[2]: model for role, model in renamed.items()}
        if config.reference is not None and "reference.path" in names:
            changes["reference"] = dataclasses.replace(config.reference, path=names["reference.path"])
        taught_by = {
            role: dataclasses.replace(model, path=names.get(f"{role}.path", model.path))
            for role, model in config.teaching_models().items()
        }
        changes["teacher"] = taught_by.pop("teacher", None)
        changes["teachers"] = {role.partition(".")[2]: model for role, model in taught_by.items()}
    if isinstance(config, Config) and config.judge is not None and "judge.path" in names:
        changes["judge"] = dataclasses.replace(config.judge, path=names["judge.path"])
    return dataclasses.replace(config, **changes)


def _recorded(config: AnyConfig) -> dict[str, dict[str, Any]]:
    """Return the models that the run recorded when it began. Return none if the run is new."""
    file = Path(config.run.dir, config.run.name, MODELS_FILE)
    if config.training.resume != "auto" or not file.is_file():
        return {}
    try:
        models: dict[str, dict[str, Any]] = json.loads(files.read_text(file))
    except (OSError, ValueError) as error:
        what = f"cannot read the models that the run recorded: {error}"
        raise ConfigError([Problem(str(file), "run.name", what, "remove the file to find the models again")]) from error
    return models
