"""`load_config`: files and overrides in, the typed configuration out, or all that is wrong with it at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from mrl.config.keys import convert
from mrl.config.learning_rules import check_learning_rules
from mrl.config.model_rules import check_model_rules, read_model_shape, unchecked
from mrl.config.names import check_data, check_names, missing_modules, unchecked_data
from mrl.config.passthrough import check_passthrough
from mrl.config.reward_rules import check_reward_rules
from mrl.config.rules import check_rules
from mrl.config.schema import Config
from mrl.config.sft import AnyConfig, DpoConfig, RmConfig, SftConfig
from mrl.config.sources import read_chain, read_overrides
from mrl.config.values import ConfigLayer, KeyPath, Secrets, holds, interpolate, merge
from mrl.errors import ConfigError, Problem

AnyTyped = TypeVar("AnyTyped", Config, SftConfig, RmConfig, DpoConfig)
AnyKind = type[Config] | type[SftConfig] | type[RmConfig] | type[DpoConfig]
VERBS: Mapping[AnyKind, str] = {Config: "train", SftConfig: "sft", RmConfig: "rm", DpoConfig: "dpo"}
"""Which command trains by which kind of configuration."""
_TOLD_BY = {"rm": "reward", "dpo": "preference"}
"""The section by which their configurations differ from that of `mrl sft`."""


@dataclass(frozen=True)
class Resolved(Generic[AnyTyped]):
    """A configuration that passed every check, with where each value came from."""

    path: str
    config: AnyTyped
    warnings: tuple[str, ...]
    """What could not be checked on this machine, and why."""
    secrets: Secrets
    _layer: ConfigLayer
    models: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)
    """Key -> `name`, `revision` and `directory` of each model, once they have been found."""

    def origin(self, path: KeyPath) -> str:
        """Return `file.yaml:12`, `command line` or `default`."""
        return self._layer.origin(path, "default") if holds(self._layer.values, path) else "default"

    def located(self, problem: Problem) -> Problem:
        return dataclasses.replace(problem, where=self.origin(tuple(problem.key.split("."))))


def load_config(path: str, overrides: Iterable[str] = ()) -> Resolved[Config]:
    """Load a file with `key.path=value` overrides; ConfigError lists everything that is wrong."""
    return _load(Config, path, overrides)


def load_config_of(verb: str, path: str, overrides: Iterable[str] = ()) -> Resolved[Any]:
    """Load the kind of configuration by which this command trains."""
    (kind,) = (kind for kind, each in VERBS.items() if each == verb)
    loaded: Resolved[Any] = _load(kind, path, overrides)
    return loaded


def load_any_config(path: str, overrides: Iterable[str] = ()) -> Resolved[Any]:
    """Load a configuration of any of them: its keys say which it is."""
    given = list(overrides)
    try:
        values = merge(read_chain(path), read_overrides(given)[0]).values
    except ConfigError:
        values = {}  # `load_config` says what is wrong
    return load_config_of(VERBS[_kind_of(values) or Config], path, given)


def config_kind(path: str) -> AnyKind | None:
    """Return which kind of configuration a file is, whether it is right or not; None where that cannot be said."""
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


def rechecked(resolved: Resolved[AnyTyped], config: AnyTyped) -> Resolved[AnyTyped]:
    """Return the same with another configuration, of which every rule is asked once more."""
    problems, warnings = _check(config)
    if problems:
        raise resolved.secrets.error(map(resolved.located, problems))
    return dataclasses.replace(resolved, config=config, warnings=tuple(map(resolved.secrets.hide, warnings)))


def _load(root: type[AnyTyped], path: str, overrides: Iterable[str]) -> Resolved[AnyTyped]:
    given = list(overrides)
    override_layer, problems = read_overrides(given)
    try:
        file_layer = read_chain(path)
    except ConfigError as error:
        problems[:0] = error.problems
        raise Secrets().error(problems) from None
    layer = merge(file_layer, override_layer)
    kind = _kind_of(layer.values)
    if kind is not None and VERBS[kind] != VERBS[root]:
        verb = VERBS[kind]
        what = f"is a configuration of `mrl {verb}`, not of `mrl {VERBS[root]}`"
        lacks = _TOLD_BY.get(VERBS[root]) if kind is SftConfig else None
        fix = f"mrl {verb} {path}{f', or add the section {lacks}' if lacks else ''}"
        raise Secrets().error([Problem(path, "", what, fix)])
    values, unresolved, secrets = interpolate(layer, path)
    problems += unresolved

    def origin(key: KeyPath) -> str:
        return layer.origin(key, path)

    config, mistakes = convert(root, values, secrets, origin)
    problems += mistakes
    warnings: list[str] = []
    if config is not None and not problems:
        problems, warnings = _check(config)
        for key, text in (("run.name", config.run.name), ("run.dir", config.run.dir)):
            if secrets.hide(text) != text:
                what = "holds a secret, and would name a directory"
                problems.append(Problem("", key, what, "name the run by something public"))
        problems = [dataclasses.replace(problem, where=origin(tuple(problem.key.split(".")))) for problem in problems]
    if config is None or problems:
        raise secrets.error(problems)
    if config.training.fallback:
        given += config.training.fallback
        _check_fallback(root, path, given)
    hidden = tuple(secrets.hide(warning) for warning in warnings)
    return Resolved(path, config, hidden, secrets, ConfigLayer(values, layer.origins))


def _check(config: AnyConfig) -> tuple[list[Problem], list[str]]:
    """Return what is wrong, and what could not be checked on this machine."""
    problems, warnings = check_passthrough(config)
    for check in (check_rules, check_data, check_names, check_learning_rules):
        problems += check(config)
    problems += check_reward_rules(config) if isinstance(config, Config) else ()
    warnings += unchecked_data(config)
    warnings += (f"{missing.key}: {missing.what}" for missing in missing_modules(config))
    roles_of: dict[tuple[str, str], list[str]] = {}
    for role in config.model_roles():
        roles_of.setdefault(config.model_of(role), []).append(role)
    for (key, path), roles in roles_of.items():
        shape = read_model_shape(key, path)
        if isinstance(shape, Problem):
            problems.append(shape)
            continue
        warnings += unchecked(path, shape)
        problems += check_model_rules(config, roles, shape) if shape is not None else ()
    return problems, warnings


def _check_fallback(root: type[AnyTyped], path: str, overrides: Sequence[str]) -> None:
    """Refuse a fallback that is wrong now, not after the loss for which it is meant."""
    try:
        _load(root, path, [*overrides, "training.fallback=[]"])
    except ConfigError as error:
        problems = [dataclasses.replace(problem, where="training.fallback") for problem in error.problems]
        raise ConfigError(problems) from None
