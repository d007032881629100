"""Rules of the section `judge`, and of the reward functions that ask its engines."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.judge import JUDGE
from mrl.config.reward import RewardFunctionConfig
from mrl.config.rules import near_multiples, nearest, problem, stays_in_a_node
from mrl.config.schema import Config
from mrl.errors import Problem


def asks_own_engines(function: RewardFunctionConfig) -> bool:
    """Return whether a reward function asks the run's own engines, which only a run has."""
    service = function.options.get("service")
    return function.name == JUDGE and isinstance(service, dict) and service.get("url") is None


def check_judge_rules(config: Config) -> Iterator[Problem]:
    """Yield every problem between the section, its pool and the functions that ask it."""
    asking = list(_asking(config))
    if config.judge is None:
        for key in asking:
            fix = f"{key}.service.url=http://HOST:8000/v1, or judge.path=MODEL and placement.roles.judge=POOL"
            yield problem(f"{key}.service.url", "there is no address, and no section judge", fix)
        return
    if not asking:
        fix = "a reward function judge without service.url, or judge=null"
        yield problem("judge", "no reward function asks it", fix)
    pool = config.placement.roles.get(JUDGE)
    if pool not in config.placement.pools:
        return
    tp, devices = config.judge.tp, config.placement.pools[pool]
    if beside := [role for role, other in config.placement.roles.items() if other == pool and role != JUDGE]:
        what = f'its engines would share pool "{pool}" with the {", ".join(beside)}, and they give no memory back'
        yield problem("placement.roles.judge", what, "a pool of its own")
    if devices % tp:
        what = f'judge.tp = {tp} does not divide the {devices} devices of pool "{pool}"'
        yield problem("judge.tp", what, nearest(f"placement.pools.{pool}", near_multiples(devices, tp)))
    yield from stays_in_a_node("judge.tp", tp, devices, config.cluster.devices_per_node)


def _asking(config: Config) -> Iterator[str]:
    """Yield the keys of the options of functions that ask the run's own engines."""
    of_validation = config.validation.reward_functions or {}
    sections = {"reward.functions": config.reward.functions, "validation.reward_functions": of_validation}
    for section, functions in sections.items():
        for label, function in functions.items():
            if asks_own_engines(function):
                yield f"{section}.{label}.options"
