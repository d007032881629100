"""`${key.path}` and `${oc.env:NAME}` turned into what they stand for, with every one that fails reported."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from mrl.config.keys import KeyPath, dotted
from mrl.config.layers import UNUSABLE, ConfigLayer
from mrl.config.secrets import Secrets, find_secrets, is_confidential
from mrl.errors import Problem

_MAX_LEVELS = 20


@dataclass
class Interpolated:
    """Plain nested values, the problems on the way to them, and which of them are secret."""

    values: dict[str, Any]
    problems: list[Problem] = field(default_factory=list)
    secrets: Secrets = field(default_factory=Secrets)


def interpolate(layer: ConfigLayer, otherwise: str) -> Interpolated:
    """The values of a merged layer; a key that cannot be resolved is a problem, and its value UNUSABLE."""
    walk = _Walk(layer, otherwise)
    values = walk.section(OmegaConf.create(layer.values), ())
    return Interpolated(values, walk.problems, find_secrets(walk.leaves))


class _Walk:
    """One pass over a merged configuration."""

    def __init__(self, layer: ConfigLayer, otherwise: str) -> None:
        self.problems: list[Problem] = []
        self.leaves: list[tuple[KeyPath, Any, Any]] = []
        self._layer = layer
        self._otherwise = otherwise

    def section(self, node: DictConfig, path: KeyPath) -> dict[str, Any]:
        written: Any = OmegaConf.to_container(node, resolve=False)
        values: dict[str, Any] = {}
        for name in written:
            inner = (*path, name)
            values[name] = UNUSABLE
            try:
                values[name] = self._value(node[name], written[name], inner)
            except MissingMandatoryValue:
                self._report(inner, "??? stands for a value to be given")
            except (OmegaConfBaseException, RecursionError) as error:
                self._report(inner, f"cannot be resolved{_reason(error, is_confidential(inner, written[name]))}")
        return values

    def _value(self, value: Any, written: Any, path: KeyPath) -> Any:
        if len(path) > _MAX_LEVELS:
            raise RecursionError("the section holds itself")
        if isinstance(value, DictConfig):
            return self.section(value, path)
        if isinstance(value, ListConfig):
            value = OmegaConf.to_container(value, resolve=True)
        self.leaves.append((path, written, value))
        return value

    def _report(self, path: KeyPath, what: str) -> None:
        self.problems.append(Problem(self._layer.origin(path, self._otherwise), dotted(path), what))


def _reason(error: Exception, confidential: bool) -> str:
    text = str(error).splitlines()[0].removeprefix("KeyError raised while resolving interpolation: ").strip('"')
    # The other messages may quote a part of the value.
    return "" if confidential and not text.startswith("Environment variable") else f": {text}"
