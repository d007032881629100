"""Baselines of RAE: a moving average of the scores of each role, kept from step to step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class RoleBaselines:
    """A moving average for each data source and role: b <- decay b + (1 - decay) R with each score R, from b = 0."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, float]] = {}

    def update(self, data_source: str, role: str, score: float, decay: float) -> float:
        """Return the baseline of a score, which includes the score itself."""
        of_source = self._values.setdefault(data_source, {})
        of_source[role] = decay * of_source.get(role, 0.0) + (1 - decay) * score
        return of_source[role]

    def figures(self) -> dict[str, float]:
        return {
            f"rae/baseline/{data_source}/{role}": value
            for data_source, of_source in self._values.items()
            for role, value in of_source.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the averages as JSON. The decay comes from the configuration."""
        return {data_source: dict(of_source) for data_source, of_source in self._values.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._values = {data_source: dict(of_source) for data_source, of_source in state.items()}
