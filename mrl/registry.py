"""Names in a configuration, resolved to objects.

Wherever mrl accepts a name, it accepts a registered one or `package.module:attribute`, so that user code need not be
part of mrl.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from mrl.errors import NameUnknown, did_you_mean

T = TypeVar("T")


def load_attribute(path: str) -> Any:
    """Return the object at `package.module:attribute`. A typed error says which half was wrong."""
    module_name, _, attribute = path.partition(":")
    try:
        value: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and not module_name.startswith(error.name):
            raise  # the module exists, but one of its imports does not
        what = f'no module "{module_name}" (from "{path}")'
        raise NameUnknown(what, fix="install it, or add it to PYTHONPATH") from error
    for part in attribute.split("."):
        if not hasattr(value, part):
            public = [name for name in vars(value) if not name.startswith("_")]
            raise NameUnknown(f'"{module_name}" has no "{attribute}"', fix=did_you_mean(part, public))
        value = getattr(value, part)
    return value


class Registry(Generic[T]):
    """Objects of one kind (advantages, rewards, datasets), by name."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that registers an object under `name`."""

        def add(entry: T) -> T:
            if name in self._entries:
                raise ValueError(f'{self.kind} "{name}" is registered twice')
            self._entries[name] = entry
            return entry

        return add

    def resolve(self, name: str) -> T:
        """Return the entry with that name, or the object at `package.module:attribute`."""
        if name in self._entries:
            return self._entries[name]
        if ":" in name:
            return load_attribute(name)  # type: ignore[no-any-return]
        fix = f"{did_you_mean(name, self._entries)} Or name your own as package.module:attribute."
        raise NameUnknown(f'unknown {self.kind} "{name}"', fix=fix)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries
