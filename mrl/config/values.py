"""Nested values in layers with their origins, the secrets among them, and `${...}` in them resolved."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from mrl.errors import ConfigError, Problem
from mrl.redaction import REDACTED, is_secret_key, redact_text

KeyPath = tuple[str, ...]
COMMAND_LINE = "command line"
MAX_LEVELS = 20
UNUSABLE = object()  # a value that is wrong in itself and already reported


def dotted(path: KeyPath) -> str:
    return ".".join(path)


@dataclass(frozen=True)
class ConfigLayer:
    """The keys that one source sets (a file, an override, or several merged): their values and where each stands."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, str] = field(default_factory=dict)

    def origin(self, path: KeyPath, otherwise: str) -> str:
        """Return where `path` stands, or the nearest section around it; `otherwise` when nothing of it was written."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
            for key, origin in self.origins.items():
                if key[:length] == path[:length]:
                    return origin  # a section that stands nowhere itself: an override of a longer key made it
        return otherwise


def merge(below: ConfigLayer, above: ConfigLayer) -> ConfigLayer:
    """Lay `above` over `below`: sections merge, everything else (lists, null) replaces."""
    values = _merge_values(below.values, above.values)
    # An origin must not outlive its value: a section that was replaced takes the origins of its keys along.
    origins = {path: origin for path, origin in (below.origins | above.origins).items() if holds(values, path)}
    return ConfigLayer(values, origins)


def _merge_values(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for name, value in above.items():
        under = merged.get(name)
        merged[name] = _merge_values(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return merged


def leaves_of(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield every value that is no section with something in it, and its key."""
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
_MIN_SECRET_LENGTH = 6  # a shorter value is hidden where it stands, but not looked for in other texts


@dataclass(frozen=True)
class Secrets:
    """The secret values of a configuration, beyond those that any text shows by itself."""

    paths: frozenset[KeyPath] = frozenset()
    values: frozenset[str] = field(default=frozenset(), repr=False)

    def hide(self, text: str) -> str:
        """Return `text` without secrets."""
        for value in sorted(self.values, key=len, reverse=True):
            text = text.replace(value, REDACTED)
        return redact_text(text)

    def error(self, problems: Iterable[Problem]) -> ConfigError:
        """Return the error of these problems, without secrets."""
        return ConfigError([Problem(*map(self.hide, dataclasses.astuple(problem))) for problem in problems])

    def shown(self, path: KeyPath, value: Any) -> Any:
        """Return the value of a key as it may be shown."""
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
    """Return the secrets among (key, text as written, value that it stands for)."""
    paths = frozenset(path for path, written, _ in leaves if is_confidential(path, written))
    values = {text for path, _, value in leaves for text in _secret_texts(value, secret=path in paths)}
    for _, written, _ in leaves:
        values |= {os.environ[name] for name in _secret_variables(written) if name in os.environ}
    return Secrets(paths, frozenset(value for value in values if len(value) >= _MIN_SECRET_LENGTH))


def is_confidential(path: KeyPath, written: Any) -> bool:
    """Return whether the value of a key is secret by the key's name or by the variable that it is taken from."""
    return _is_secret(path) or bool(_secret_variables(written))


def _is_secret(path: KeyPath) -> bool:
    # What a user's code is given beside its options is what must not stand there, however it is called.
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
    """Return the values of a merged layer, plain and resolved, the problems on the way to them, and which of them are
    secret. A key that cannot be resolved is a problem, and its value UNUSABLE."""
    problems: list[Problem] = []
    leaves: list[tuple[KeyPath, Any, Any]] = []

    def section(node: DictConfig, written: Any, path: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name in written:
            inner, what = (*path, name), ""
            try:
                values[name] = value_of(node[name], written[name], inner)
            except MissingMandatoryValue:
                what = "??? stands for a value to be given"
            except (OmegaConfBaseException, RecursionError) as error:
                what = f"cannot be resolved{_reason(error, is_confidential(inner, written[name]))}"
            if what:
                values[name] = UNUSABLE
                problems.append(Problem(layer.origin(inner, otherwise), dotted(inner), what))
        return values

    def value_of(value: Any, written: Any, path: KeyPath) -> Any:
        if len(path) > MAX_LEVELS:
            raise RecursionError("the section holds itself")
        if isinstance(value, DictConfig):
            is_written = isinstance(written, dict)  # else it stands for a section that is written elsewhere
            return section(value, written if is_written else OmegaConf.to_container(value, resolve=False), path)
        if isinstance(value, ListConfig):
            value = OmegaConf.to_container(value, resolve=True)
        leaves.append((path, written, value))
        return value

    values = section(OmegaConf.create(layer.values), layer.values, ())
    return values, problems, find_secrets(leaves)


def _reason(error: Exception, confidential: bool) -> str:
    text = str(error).splitlines()[0].removeprefix("KeyError raised while resolving interpolation: ").strip('"')
    # The other messages may quote a part of the value.
    return "" if confidential and not text.startswith("Environment variable") else f": {text}"
