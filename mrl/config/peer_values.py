"""Rules that several systems share: the pool of all devices, KL terms, group baselines, and values by either name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mrl.config.peer_import import Imported, KeyReport
from mrl.config.verl_values import Convert, Values, same


def first_of(values: Values, *names: str, default: Any = None) -> Any:
    """Return the value of the first of these keys, with dots for sections, that is present and not null."""
    for name in names:
        value: Any = values
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None:
            return value
    return default


def count_of(values: Values, *names: str, default: int | None = None) -> int | None:
    value = first_of(values, *names, default=default)
    return value if type(value) is int and value > 0 else default


def product(*numbers: int | None) -> int | None:
    """Return the product, or None if a number is unknown."""
    result = 1
    for number in numbers:
        if number is None:
            return None
        result *= number
    return result


def said(text: str) -> Convert:
    """Say this about the key and set nothing."""
    return lambda value, values: f", {text}"


def noted(text: str) -> Convert:
    """Keep the value, with a remark."""
    return lambda value, values: f"{same(value, values)}, {text}" if same(value, values) else ""


def switch(on: str, off: str) -> Convert:
    """Replace a switch by one of two values."""
    return lambda value, values: f"={on if value is True else off}"


def sequence_parallel(tp: str) -> Convert:
    """Keep the switch if tensor parallelism, whose size has this key, is on."""
    return lambda value, values: f"={'true' if value is True and (count_of(values, tp) or 1) > 1 else 'false'}"


def fit_longest(made: Imported, key: str) -> None:
    """Make micro-batches as long as the longest sample. The other system gives a longer one a micro-batch alone."""
    rollout, actor = made.values.get("rollout", {}), made.values.get("actor", {})
    lengths = [rollout.get(f"max_{part}_tokens") for part in ("prompt", "response")]
    tokens, cp = actor.get("max_tokens_per_device"), actor.get("parallel", {}).get("cp", 1)
    if all(type(number) is int for number in (*lengths, tokens, cp)) and tokens * cp < sum(lengths):
        needed = -(-sum(lengths) // cp)
        made.set("actor.max_tokens_per_device", needed, again=True)
        remark = "the longest sample on its context-parallel ranks; there, a longer one is a micro-batch alone"
        made.changed.append(KeyReport(key, tokens, f"actor.max_tokens_per_device={needed}", remark))


def set_kl(made: Imported, key: str, where: str, coef: Any, estimator: Any) -> None:
    """Add the KL term of this place. A coefficient of 0 needs no reference model."""
    if not isinstance(coef, int | float) or coef == 0:
        made.set("algorithm.kl.where", "none")
        remark = "a coefficient of 0 only measures the KL there; set one to keep a reference"
        made.changed.append(KeyReport(key, coef, "algorithm.kl.where=none", remark))
        return
    made.set("algorithm.kl.where", where)
    made.set("algorithm.kl.coef", coef)
    shown = f"algorithm.kl.where={where}, algorithm.kl.coef={coef}"
    if estimator is not None:
        name = {"low_var_kl": "k3"}.get(estimator, estimator)
        made.set(f"algorithm.kl.in_{where}", name)
        shown += f", algorithm.kl.in_{where}={name}"
    made.taken.append(KeyReport(key, coef, shown))


def set_machines(made: Imported, nodes: int, per_node: int, engines: int | None, roles: Mapping[str, str]) -> None:
    """Add the pools: one for all roles, or another one with `engines` devices. Nodes have `per_node` devices."""
    trainers = nodes * per_node
    made.set("cluster.device", "gpu")
    made.set("cluster.devices_per_node", per_node)
    if engines is None:
        made.set("cluster.nodes", nodes)
        made.set("placement", {"pools": {"all": trainers}, "roles": dict.fromkeys(roles, "all")})
        return
    made.set("cluster.nodes", -(-(trainers + engines) // per_node))
    pools = {"trainers": trainers, "engines": engines}
    made.set("placement", {"pools": pools, "roles": {**dict.fromkeys(roles, "trainers"), "rollout": "engines"}})


def set_default(made: Imported, name: str, value: Any, remark: str) -> None:
    """Set the other system's default for keys that are not given, if mrl's default differs."""
    if made.set(name, value) is None:
        made.changed.append(KeyReport("(default)", "", f"{name}={value}", remark))
