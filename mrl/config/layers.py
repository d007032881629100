"""Where values come from: layers of nested keys, each key with its origin, laid one over the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mrl.config.keys import KeyPath

COMMAND_LINE = "command line"
UNUSABLE = object()  # a value that is wrong in itself and already reported


@dataclass(frozen=True)
class ConfigLayer:
    """The keys that one source sets (a file, an override, or several merged): their values and where each stands."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, str] = field(default_factory=dict)

    def origin(self, path: KeyPath, otherwise: str) -> str:
        """Where `path` stands, or the nearest section around it; `otherwise` when nothing of it was written."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
            for key, origin in self.origins.items():
                if key[:length] == path[:length]:
                    return origin  # a section that stands nowhere itself: an override of a longer key made it
        return otherwise


def merge(below: ConfigLayer, above: ConfigLayer) -> ConfigLayer:
    """`above` laid over `below`: sections merge, everything else (lists, null) replaces."""
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


def holds(values: Any, path: KeyPath) -> bool:
    """Whether nested mappings have this key."""
    for name in path:
        if not isinstance(values, Mapping) or name not in values:
            return False
        values = values[name]
    return True
