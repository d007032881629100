"""Rules for the section `judge`."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.reward import JUDGE
from mrl.config.rules.problems import near_multiples, nearest, problem, stays_in_a_node
from mrl.config.rules.reward_options import asks_own_engines
from mrl.config.schema import Config
from mrl.errors import Problem


def check_judge(config: Config) -> Iterator[Problem]:
    if config.judge is None:
        return
    if not any(asks_own_engines(function) for _, function in config.reward_functions()):
        fix = "add a reward function `judge` without service.url, or set judge=null"
        yield problem("judge", "no reward function uses it", fix)
    pool = config.placement.roles.get(JUDGE)
    if pool not in config.placement.pools:
        return
    tp, devices = config.judge.tp, config.placement.pools[pool]
    if devices % tp:
        what = f'judge.tp = {tp} does not divide the {devices} devices of pool "{pool}"'
        yield problem("judge.tp", what, nearest(f"placement.pools.{pool}", near_multiples(devices, tp)))
    yield from stays_in_a_node("judge.tp", tp, devices, config.cluster.devices_per_node)
