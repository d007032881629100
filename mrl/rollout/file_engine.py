"""Engines that serve what the files of a model hold: nobody trains, and no weights travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mrl.config.arithmetic import has_own_rollout_pool, num_engines, role_devices
from mrl.config.reward import JUDGE
from mrl.config.schema import Config, PlacementConfig
from mrl.controller import RunContext
from mrl.rollout.engine import EngineSettings
from mrl.rollout.hybrid_engine import HybridEngine


def engines_alone(config: Config) -> Config:
    """Return a configuration with as many engines, and no other roles but the judge and reward models.

    These keep their pools, and may share that of the engines, which have ended when they start.
    """
    where = config.placement.roles["rollout" if has_own_rollout_pool(config) else "actor"]
    pools, roles = {where: num_engines(config) * config.rollout.tp}, {"actor": "nobody", "rollout": where}
    for role in config.scoring_models():
        pool = roles[role] = config.placement.roles[role]
        pools[pool] = config.placement.pools[pool]
    if config.judge is not None:
        pools[JUDGE], roles[JUDGE] = role_devices(config, JUDGE), JUDGE
    placement = PlacementConfig(pools=pools, roles=roles)
    return replace(config, placement=placement, critic=None, teacher=None)


class FileEngine(HybridEngine):
    """The engines of a configuration of `engines_alone`."""

    def __init__(self, config: Config, context: RunContext, *, reads_text: bool = False) -> None:
        super().__init__(config, {}, context, reads_text=reads_text)

    def _settings(self, index: int) -> EngineSettings:
        return replace(super()._settings(index), loads_files=True)

    def _send_weights(self, replicas: Sequence[int], version: int) -> None:
        """Nothing: each has loaded them."""
