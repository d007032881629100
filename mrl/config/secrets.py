"""What must not be shown of one configuration, whether it came by key or by environment."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from mrl.config.keys import KeyPath
from mrl.redaction import REDACTED, is_secret_key, redact_text

_ENVIRONMENT = re.compile(r"oc\.env:\s*['\"]?([A-Za-z_][A-Za-z0-9_]*)")
_MIN_SECRET_LENGTH = 6  # a shorter value is hidden where it stands, but not looked for in other texts


@dataclass(frozen=True)
class Secrets:
    """The secret values of a configuration, beyond those that any text shows by itself."""

    paths: frozenset[KeyPath] = frozenset()
    values: frozenset[str] = field(default=frozenset(), repr=False)

    def hide(self, text: str) -> str:
        """`text` without secrets."""
        for value in sorted(self.values, key=len, reverse=True):
            text = text.replace(value, REDACTED)
        return redact_text(text)

    def shown(self, path: KeyPath, value: Any) -> Any:
        """The value of a key as it may be shown."""
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
    """The secrets among (key, text as written, value that it stands for)."""
    paths = frozenset(path for path, written, _ in leaves if is_confidential(path, written))
    values = {text for path, _, value in leaves for text in _secret_texts(value, secret=path in paths)}
    for _, written, _ in leaves:
        values |= {os.environ[name] for name in _secret_variables(written) if name in os.environ}
    return Secrets(paths, frozenset(value for value in values if len(value) >= _MIN_SECRET_LENGTH))


def is_confidential(path: KeyPath, written: Any) -> bool:
    """Whether the value of a key is secret by the key's name or by the variable that it is taken from."""
    return _is_secret(path) or bool(_secret_variables(written))


def _is_secret(path: KeyPath) -> bool:
    return any(is_secret_key(name) for name in path)


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
    return [name for name in _ENVIRONMENT.findall(str(written)) if is_secret_key(name)]
