"""A model's `config.json`, read strictly: needed keys must exist, with the right type and a supported value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from mrl import files
from mrl.errors import ModelError, did_you_mean

T = TypeVar("T")


class HfConfig:
    """Keys and values of a `config.json`. Null counts as missing."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = {key: value for key, value in values.items() if value is not None}
        self.nulls = values.keys() - self.values.keys()
        self.where = where

    @classmethod
    def read(cls, path: str | Path) -> HfConfig:
        file = Path(path) / "config.json"
        try:
            values = json.loads(files.read_text(file))
        except OSError as error:
            raise ModelError(
                f"cannot be read: {error.strerror}", where=str(file), fix="give a Hugging Face model directory"
            ) from error
        except (ValueError, RecursionError) as error:
            raise ModelError("is not JSON", where=str(file)) from error
        if not isinstance(values, dict):
            raise ModelError("is not a JSON object", where=str(file))
        return cls(values, str(file))

    def defaulting(self, **values: Any) -> HfConfig:
        """Return a copy with defaults for missing keys of this kind of file."""
        return HfConfig({**dict.fromkeys(self.nulls), **values, **self.values}, self.where)

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def integer(self, *names: str) -> int:
        """Return a positive integer, under any of these names."""
        value = self._value(names)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(names[0], f"{value!r} is not a whole number above zero")
        return value

    def number(self, name: str) -> float:
        """Return a nonnegative number."""
        value = self._value((name,))
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise self.error(name, f"{value!r} is not a number from zero")
        return float(value)

    def flag(self, name: str) -> bool:
        return self._typed(bool, name)

    def text(self, *names: str) -> str:
        """Return a string, under any of these names."""
        return self._typed(str, *names)

    def items(self, name: str, kind: type) -> list[Any]:
        values = self._typed(list, name)
        if not all(isinstance(value, kind) for value in values):
            raise self.error(name, f"{values!r} contains values that are not of type {kind.__name__}")
        return values

    def section(self, name: str) -> HfConfig:
        return HfConfig(self._typed(dict, name), f"{self.where}: {name}")

    def of_language_model(self) -> HfConfig:
        """Return the part about the language model, if the file describes a model with vision."""
        if "text_config" not in self:
            return self
        section = self.section("text_config")
        tied = {name: self.values[name] for name in ("tie_word_embeddings",) if name in self}
        return HfConfig({**dict.fromkeys(section.nulls), **section.values, **tied}, section.where)

    def require(self, name: str, only: Any, explanation: str = "") -> None:
        """Raise an error if the file sets a value other than `only`, the single supported one; None forbids any
        value."""
        value = self.values.get(name, only)
        if value != only:
            reason = f": {explanation}" if explanation else ""
            fix = f"use another model; or set it to {json.dumps(only)}, if the weights were trained that way"
            raise self.error(name, f"{value!r} is not supported, only {only!r}{reason}", fix)

    def error(self, name: str, what: str, fix: str = "") -> ModelError:
        """Return an error about one key."""
        return ModelError(f"{name}: {what}", where=self.where, fix=fix)

    def _typed(self, kind: type[T], *names: str) -> T:
        value = self._value(names)
        if not isinstance(value, kind):
            raise self.error(names[0], f"{value!r} is not of type {kind.__name__}")
        return value

    def _value(self, names: tuple[str, ...]) -> Any:
        for name in names:
            if name in self.values:
                return self.values[name]
        raise self.error(names[0], "is missing", f"add it to the file ({did_you_mean(names[0], self.values)})")
