"""Nested values in layers with their origins; secrets among them; resolution of `${...}`."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from mrl.errors import ConfigError, Problem
from mrl.redaction import REDACTED, is_secret_key, redact_text

KeyPath = tuple[str, ...]
COMMAND_LINE = "command line"
MAX_LEVELS = 20
UNUSABLE = object()  # already reported as wrong


def dotted(path: KeyPath) -> str:
    return ".".join(path)


@dataclass(frozen=True)
class ConfigLayer:
    """Keys set by one source (a file, an override, or several merged), with their values and origins."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, str] = field(default_factory=dict)

    def origin(self, path: KeyPath, otherwise: str) -> str:
        """Return the origin of `path` or of the nearest section around it. Return `otherwise` if none of it was set."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
            for key, origin in self.origins.items():
                if key[:length] == path[:length]:
                    return origin  # a section that is not set itself, but an override sets one of its keys
        return otherwise


def merge(below: ConfigLayer, above: ConfigLayer) -> ConfigLayer:
    """Merge `above` over `below`. Sections are merged; all other values (lists, null) are replaced."""
    values = _merge_values(below.values, above.values)
    # An origin must not outlive its value: if a section is replaced, the origins of its keys are dropped too.
    origins = {path: origin for path, origin in (below.origins | above.origins).items() if holds(values, path)}
    return ConfigLayer(values, origins)


def _merge_values(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for name, value in above.items():
        under = merged.get(name)
        merged[name] = _merge_values(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return merged


def leaves_of(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield every value that is not a nonempty section, with its key."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from leaves_of(inner, (*path, str(name)))
    else:
        yield path, value


def holds(values: Any, path: KeyPath) -> bool:
    for name in path:
        if not isinstance(values, Mapping) or name not in values:
            return False
        values = values[name]
    return True


# --- secrets ----------------------------------------------------------------------------------------------------------

ENVIRONMENT_VARIABLE = re.compile(r"oc\.env:\s*['\"]?([A-Za-z_][A-Za-z0-9_]*)")
_MIN_SECRET_LENGTH = 6  # a shorter value is hidden in its own place, but not searched for in other texts


@dataclass(frozen=True)
class Secrets:
    """The secret values of a configuration, in addition to those recognized in any text."""

    paths: frozenset[KeyPath] = frozenset()
    values: frozenset[str] = field(default=frozenset(), repr=False)

    def hide(self, text: str) -> str:
        """Return `text` without secrets."""
        for value in sorted(self.values, key=len, reverse=True):
            text = text.replace(value, REDACTED)
        return redact_text(text)

    def error(self, problems: Iterable[Problem]) -> ConfigError:
        """Return an error with these problems, without secrets."""
        return ConfigError([Problem(*map(self.hide, dataclasses.astuple(problem))) for problem in problems])

    def shown(self, path: KeyPath, value: Any) -> Any:
        """Return the value of a key in a form that may be shown."""
        if isinstance(value, bool) or value is None:
            return value
        if not isinstance(value, (dict, list)) and (path in self.paths or _is_secret(path)):
            return REDACTED
        if isinstance(value, str):
            return self.hide(value)
        if isinstance(value, dict):
            return {self.hide(str(name)): self.shown((*path, str(name)), item) for name, item in value.items()}
        if isinstance(value, list):
            return [self.shown(path, item) for item in value]
        return REDACTED if str(value) in self.values else value


def find_secrets(leaves: list[tuple[KeyPath, Any, Any]]) -> Secrets:
    """Return the secrets among (key, text as written, resolved value)."""
    paths = frozenset(path for path, written, _ in leaves if is_confidential(path, written))
    values = {text for path, _, value in leaves for text in _secret_texts(value, secret=path in paths)}
    for _, written, _ in leaves:
        values |= {os.environ[name] for name in _secret_variables(written) if name in os.environ}
    return Secrets(paths, frozenset(value for value in values if len(value) >= _MIN_SECRET_LENGTH))


def is_confidential(path: KeyPath, written: Any) -> bool:
    """Return whether a value is secret, judged by its key or by the environment variable that it comes from."""
    return _is_secret(path) or bool(_secret_variables(written))


def _is_secret(path: KeyPath) -> bool:
    # The environments of user code hold secrets under any name; other values belong in `options`.
    return path[:2] in (("reward", "environment"), ("agent", "environment")) or any(
        is_secret_key(name) for name in path
    )


def _secret_texts(value: Any, *, secret: bool) -> Iterator[str]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _secret_texts(item, secret=secret or is_secret_key(str(name)))
    elif isinstance(value, list):
        for item in value:
            yield from _secret_texts(item, secret=secret)
    elif secret and not isinstance(value, bool):
        yield str(value)


def _secret_variables(written: Any) -> list[str]:
    return [name for name in ENVIRONMENT_VARIABLE.findall(str(written)) if is_secret_key(name)]


# --- interpolation ----------------------------------------------------------------------------------------------------


def interpolate(layer: ConfigLayer, otherwise: str) -> tuple[dict[str, Any], list[Problem], Secrets]:
    """Return the resolved values of a merged layer, the problems, and the secrets. A key that cannot be resolved is a
    problem, and its value is UNUSABLE."""
    plain = [(path, value, value) for path, value in leaves_of(layer.values)]
    if not any(_may_refer(value) or len(path) > MAX_LEVELS for path, value, _ in plain):
        return deepcopy(layer.values), [], find_secrets(plain)  # OmegaConf would take as long as everything else
    problems: list[Problem] = []
    leaves: list[tuple[KeyPath, Any, Any]] = []

    def section(node: DictConfig, written: Any, path: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name in written:
            inner, reason = (*path, name), ""
            try:
                values[name] = value_of(node[name], written[name], inner)
            except MissingMandatoryValue:
                reason = "??? must be replaced with a value"
            except (OmegaConfBaseException, RecursionError) as error:
                reason = f"cannot be resolved{_reason(error, is_confidential(inner, written[name]))}"
            if reason:
                values[name] = UNUSABLE
                problems.append(Problem(layer.origin(inner, otherwise), dotted(inner), reason))
        return values

    def value_of(value: Any, written: Any, path: KeyPath) -> Any:
        if len(path) > MAX_LEVELS:
            raise RecursionError("the section contains itself")
        if isinstance(value, DictConfig):
            is_written = isinstance(written, dict)  # else an interpolation of a section
            return section(value, written if is_written else OmegaConf.to_container(value, resolve=False), path)
        if isinstance(value, ListConfig):
            value = OmegaConf.to_container(value, resolve=True)
        leaves.append((path, written, value))
        return value

    values = section(OmegaConf.create(layer.values), layer.values, ())
    return values, problems, find_secrets(leaves)


def _may_refer(value: Any) -> bool:
    """Return whether a value may contain an interpolation, or must be replaced."""
    return not isinstance(value, bool | int | float | None) and any(mark in str(value) for mark in ("${", "???"))


def _reason(error: Exception, confidential: bool) -> str:
    text = str(error).splitlines()[0].removeprefix("KeyError raised while resolving interpolation: ").strip('"')
    # The other messages may quote a part of the value.
    return "" if confidential and not text.startswith("Environment variable") else f": {text}"
