"""What the supervisor and its workers need to know of the configuration, as plain data."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from mrl.config.schema import RewardConfig
from mrl.errors import RewardError
from mrl.rewards.frames import to_json


@dataclass(frozen=True)
class FunctionSettings:
    """One reward function of several: what the user calls it, what it is, how much it counts."""

    label: str
    name: str
    weight: float
    options: dict[str, Any]


@dataclass(frozen=True)
class PoolSettings:
    """The functions and the limits under which they run."""

    functions: tuple[FunctionSettings, ...]
    num_workers: int
    limit_s: float
    start_limit_s: float
    memory_bytes: int
    max_samples_per_s: float | None

    def to_json(self) -> bytes:
        """The settings as they travel to the supervisor."""
        try:
            return to_json(asdict(self))
        except (TypeError, ValueError) as error:
            raise RewardError(f"an option is not plain data: {error}", where="reward.functions") from error

    @classmethod
    def from_json(cls, body: bytes) -> PoolSettings:
        """The settings that `to_json` wrote."""
        values = json.loads(body)
        functions = tuple(FunctionSettings(**function) for function in values.pop("functions"))
        return cls(functions=functions, **values)


def pool_settings(config: RewardConfig) -> PoolSettings:
    """The part of the configuration that concerns the processes."""
    return PoolSettings(
        functions=tuple(
            FunctionSettings(label, function.name, function.weight, function.options)
            for label, function in config.functions.items()
        ),
        num_workers=config.num_workers,
        limit_s=config.limit_s,
        start_limit_s=config.start_limit_s,
        memory_bytes=config.memory_bytes,
        max_samples_per_s=config.max_samples_per_s,
    )
