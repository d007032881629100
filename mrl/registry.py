"""Names that users write in a configuration, turned into the objects that they stand for.

Wherever mrl accepts a name it accepts either a registered one or `package.module:attribute`, so nothing of
a user's has to live inside mrl.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from mrl.errors import NameUnknown, did_you_mean

T = TypeVar("T")


def load_attribute(path: str) -> Any:
    """Return the object that `package.module:attribute` names; a typed error says which half was wrong."""
    module_name, _, attribute = path.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and not module_name.startswith(error.name):
            raise  # the module exists; something that it imports does not
        what = f'no module "{module_name}" (from "{path}")'
        raise NameUnknown(what, fix="is it installed, or on PYTHONPATH?") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [name for name in vars(found) if not name.startswith("_")]
            raise NameUnknown(f'"{module_name}" has no "{attribute}"', fix=did_you_mean(part, public))
        found = getattr(found, part)
    return found


class Registry(Generic[T]):
    """One kind of thing (an advantage, a reward, a dataset), by name."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator: make the decorated object known as `name`."""

        def add(entry: T) -> T:
            if name in self._entries:
                raise ValueError(f'{self.kind} "{name}" is registered twice')
            self._entries[name] = entry
            return entry

        return add

    def resolve(self, name: str) -> T:
        """Return the entry of that name, or the object at `package.module:attribute`."""
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
