"""Rules for the sections `cluster` and `placement`: machines, pools, and the roles in them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from mrl.config.arithmetic import role_devices
from mrl.config.hardware import HARDWARE
from mrl.config.reward import JUDGE
from mrl.config.rules.problems import nearest, problem
from mrl.config.schema import Config
from mrl.config.sft import AnyConfig, SftConfig
from mrl.errors import Problem, did_you_mean

_ROLES = ("actor", "critic", "reference", "reward_model", "teacher", "rollout", JUDGE)


def check_cluster(config: AnyConfig) -> Iterator[Problem]:
    """Check that the pools fit into the cluster, and that a Ray started here is used on one machine only."""
    cluster, pools = config.cluster, config.placement.pools
    wanted, present = sum(pools.values()), cluster.nodes * cluster.devices_per_node
    if wanted > present:
        parts = " + ".join(f"{name} {size}" for name, size in pools.items())
        what = f"{parts} = {wanted} devices; the cluster has {cluster.nodes} x {cluster.devices_per_node} = {present}"
        yield problem("placement.pools", what, nearest("cluster.nodes", [math.ceil(wanted / cluster.devices_per_node)]))
    if (name := cluster.hardware) is not None and name not in HARDWARE:
        yield problem("cluster.hardware", f'"{name}" is not known', did_you_mean(name, HARDWARE))
    if cluster.nodes > 1 and cluster.ray_address is None:
        what = f"{cluster.nodes} nodes, but without cluster.ray_address Ray starts on this machine only"
        yield problem("cluster.nodes", what, "cluster.ray_address=auto, or cluster.nodes=1")


def check_placement(config: AnyConfig) -> Iterator[Problem]:
    placement, models = config.placement, [*config.model_roles()]
    if isinstance(config, Config) and config.judge is not None:
        models.append(JUDGE)
    for role, pool in placement.roles.items():
        key = f"placement.roles.{role}"
        if role not in _ROLES and role not in models:
            yield problem(key, "unknown role", did_you_mean(role, _ROLES))
        elif role not in models and (role != "rollout" or isinstance(config, SftConfig)):
            fix = f"set {key}=null" if isinstance(config, SftConfig) else f"add one, or set {key}=null"
            yield problem(key, f"the section `{role}` is missing", fix)
        if pool not in placement.pools:
            yield problem(key, f'unknown pool "{pool}"', did_you_mean(pool, placement.pools))
    for role in models:
        if role not in placement.roles:
            pool, key = next(iter(placement.pools), "POOL"), "placement.roles"
            fix = f"{key}={{{role}: {pool}}}" if "." in role else f"{key}.{role}={pool}"
            yield problem(key, f"the {role} has no pool", fix)
    for pool in placement.pools:
        if pool not in placement.roles.values():
            key = f"placement.pools.{pool}"
            yield problem(key, "no role uses this pool", f"remove it: {key}=null")
    if isinstance(config, Config):
        yield from _engines_share(config)


def placed(config: AnyConfig) -> Iterator[tuple[str, int]]:
    """Yield each role that has a pool, and its number of devices."""
    for role in config.model_roles():
        if config.placement.roles.get(role) in config.placement.pools:
            yield role, role_devices(config, role)


def _engines_share(config: Config) -> Iterator[Problem]:
    """Check that the engines share devices only with the actor, because only the actor and the engines can hand memory
    to each other, and that the judge shares them with no role."""
    roles = config.placement.roles
    pool = roles.get(JUDGE) if config.judge is not None else None
    if pool is not None and pool in config.placement.pools and (sharing := _others_in(pool, JUDGE, roles)):
        what = f'the judge would share pool "{pool}" with the {", ".join(sharing)}, but never frees its memory'
        yield problem("placement.roles.judge", what, "give the judge its own pool")
    pool = roles.get("rollout")
    if pool is not None and pool != roles.get("actor") and (sharing := _others_in(pool, "rollout", roles)):
        what = f'the engines would share pool "{pool}" with the {", ".join(sharing)}, but not the actor'
        fix = "give the engines their own pool, or set placement.roles.rollout=null to put them on the actor's devices"
        yield problem("placement.roles.rollout", what, fix)


def _others_in(pool: str, role: str, roles: Mapping[str, str]) -> list[str]:
    return [other for other, its_pool in roles.items() if its_pool == pool and other != role]
