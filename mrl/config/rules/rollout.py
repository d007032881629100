"""Rules for the section `rollout`."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.rules.cluster import placed, stays_in_a_node
from mrl.config.rules.problems import near_divisors, nearest, problem
from mrl.config.schema import Config
from mrl.errors import Problem


def check_rollout(config: Config) -> Iterator[Problem]:
    """Check that the engines fit on their devices and share them only with the actor. Only the actor and the engines
    can hand memory to each other."""
    here, roles, pools = config.cluster.devices_per_node, config.placement.roles, config.placement.pools
    for role, devices in placed(config):
        yield from stays_in_a_node(f"{role}.parallel.tp", config.model_roles()[role].parallel.tp, devices, here)
    tp, replicas, role = config.rollout.tp, config.rollout.replicas, "rollout" if "rollout" in roles else "actor"
    if roles.get(role) in pools:
        devices = pools[roles[role]]
        yield from stays_in_a_node("rollout.tp", tp, devices, here)
        pool = f"the {devices} devices of the pool of the {role}"
        if replicas is None and devices % tp:
            fix = nearest("rollout.tp", near_divisors(tp, devices))
            yield problem("rollout.tp", f"{tp} does not divide {pool}", fix)
        elif replicas is not None and replicas * tp > devices:
            fix = f"rollout.replicas={devices // tp}" if devices >= tp else f"rollout.tp={devices}"
            yield problem("rollout.replicas", f"{replicas} engines with {tp} devices each do not fit on {pool}", fix)
    if role == "actor" or roles[role] == roles.get("actor"):
        return
    if sharing := [other for other, pool in roles.items() if pool == roles[role] and other != role]:
        what = f'the engines would share pool "{roles[role]}" with the {", ".join(sharing)}, but not the actor'
        fix = "give the engines their own pool, or set placement.roles.rollout=null to put them on the actor's devices"
        yield problem("placement.roles.rollout", what, fix)
