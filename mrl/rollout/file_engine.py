"""Engines that serve what the files of a model hold: nobody trains, and no weights travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mrl.config.arithmetic import num_engines
from mrl.config.schema import Config, PlacementConfig
from mrl.controller import RunContext
from mrl.rollout.engine import EngineSettings
from mrl.rollout.hybrid_engine import HybridEngine


def engines_alone(config: Config) -> Config:
    """Return a configuration with as many engines, a pool of their own, and no other."""
    pools = {"engines": num_engines(config) * config.rollout.tp}
    placement = PlacementConfig(pools=pools, roles={"actor": "nobody", "rollout": "engines"})
    return replace(config, placement=placement, critic=None, reward_model=None)


class FileEngine(HybridEngine):
    """The engines of a configuration of `engines_alone`."""

    def __init__(self, config: Config, context: RunContext) -> None:
        super().__init__(config, {}, context)

    def _settings(self, index: int) -> EngineSettings:
        return replace(super()._settings(index), loads_files=True)

    def _send_weights(self, replicas: Sequence[int], version: int) -> None:
        """Nothing: each has loaded them."""
