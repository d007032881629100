"""A user's own figures of a step. They cannot hurt: a function that fails is reported once, and the run goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mrl.protocol import DataProto
from mrl.registry import load_attribute

Warn = Callable[[str, str], None]


class OwnMetrics:
    """The functions that `training.metrics` names."""

    def __init__(self, names: Sequence[str], warn: Warn) -> None:
        self._functions = {name: load_attribute(name) for name in names}
        self._warn = warn
        self._reported: set[str] = set()

    def of(self, batch: DataProto) -> dict[str, float]:
        """Return the figures of a step's batch, as the driver knows it: texts, scores, lengths, uids, sources."""
        figures: dict[str, float] = {}
        for name, function in self._functions.items():
            try:
                figures |= {f"own/{key}": float(value) for key, value in function(batch).items()}
            except Exception as error:
                self._report(name, f"{type(error).__name__}: {error}")
        return figures

    def _report(self, name: str, what: str) -> None:
        if name not in self._reported:
            self._reported.add(name)
            self._warn("training.metrics", f"{name} failed, and its figures are missing: {what:.500}")
