"""Rules for the section `judge`."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.reward import JUDGE, RewardFunctionConfig
from mrl.config.rules.cluster import stays_in_a_node
from mrl.config.rules.problems import near_multiples, nearest, problem
from mrl.config.schema import Config
from mrl.errors import Problem


def asks_own_engines(function: RewardFunctionConfig) -> bool:
    """Return whether a reward function uses the run's own judge engines, which exist only during a run."""
    service = function.options.get("service")
    return function.name == JUDGE and isinstance(service, dict) and service.get("url") is None


def check_judge(config: Config) -> Iterator[Problem]:
    asking = [f"{key}.options" for key, function in config.reward_functions() if asks_own_engines(function)]
    if config.judge is None:
        for key in asking:
            fix = f"{key}.service.url=http://HOST:8000/v1, or judge.path=MODEL and placement.roles.judge=POOL"
            yield problem(f"{key}.service.url", "neither an address nor a section `judge` is configured", fix)
        return
    if not asking:
        fix = "add a reward function `judge` without service.url, or set judge=null"
        yield problem("judge", "no reward function uses it", fix)
    pool = config.placement.roles.get(JUDGE)
    if pool not in config.placement.pools:
        return
    tp, devices = config.judge.tp, config.placement.pools[pool]
    if sharing := [role for role, other in config.placement.roles.items() if other == pool and role != JUDGE]:
        what = f'the judge would share pool "{pool}" with the {", ".join(sharing)}, but never frees its memory'
        yield problem("placement.roles.judge", what, "give the judge its own pool")
    if devices % tp:
        what = f'judge.tp = {tp} does not divide the {devices} devices of pool "{pool}"'
        yield problem("judge.tp", what, nearest(f"placement.pools.{pool}", near_multiples(devices, tp)))
    yield from stays_in_a_node("judge.tp", tp, devices, config.cluster.devices_per_node)
