"""Rules for the section `rollout`."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mrl.config.arithmetic import corrects_engines
from mrl.config.rules.problems import near_divisors, near_multiples, nearest, problem, stays_in_a_node
from mrl.config.rules.sglang import check_sglang
from mrl.config.schema import Config
from mrl.errors import Problem


def check_rollout(config: Config) -> Iterator[Problem]:
    """Check that the engines fit on their devices, and that batches ahead are drawn from the whole distribution."""
    here, roles, pools = config.cluster.devices_per_node, config.placement.roles, config.placement.pools
    tp, replicas, role = config.rollout.tp, config.rollout.replicas, "rollout" if "rollout" in roles else "actor"
    yield from _stages(config)
    yield from _data_parallel(config)
    if roles.get(role) in pools:
        devices, size = pools[roles[role]], config.rollout.num_devices
        yield from _engine_nodes(config, devices, here, roles[role])
        pool = f"the {devices} devices of the pool of the {role}"
        if replicas is None and devices % size:
            yield _size_problem(config, f"does not divide {pool}", _near_sizes(config, devices))
        elif replicas is not None and replicas * size > devices:
            fix = f"rollout.replicas={devices // size}" if devices >= size else f"rollout.tp={devices}"
            yield problem("rollout.replicas", f"{replicas} engines with {size} devices each do not fit on {pool}", fix)
    if (
        config.cluster.device == "cpu"
        and tp * config.rollout.dp > 1
        and config.rollout.vllm.get("enable_expert_parallel")
    ):
        key, axis = "rollout.vllm.enable_expert_parallel", "dp" if config.rollout.dp > 1 else "tp"
        what = "true: vLLM's kernels for experts on a CPU ignore which experts a rank has, and crash with "
        what += f"{axis} {max(tp, config.rollout.dp)}"
        yield problem(key, what, f"{key}=false, or rollout.{axis}=1")
    quantization = config.rollout.vllm.get("quantization") or config.rollout.vllm.get("quantization_config")
    if quantization and not corrects_engines(config):
        what = f"null: engines with {quantization} sample from other probabilities than the trainer's"
        fix = "algorithm.correction={upper: 2.0}, or rollout.vllm.quantization=null"
        yield problem("algorithm.correction", what, fix)
    if config.asynchrony.ahead:
        yield from _sampled_ahead(config)
    yield from check_sglang(config)


def _engine_nodes(config: Config, devices: int, here: int, pool: str) -> Iterator[Problem]:
    """Yield a problem if an engine would have a part of a node and a part of another, or span nodes without vLLM."""
    size, tp = config.rollout.num_devices, config.rollout.tp
    if size == tp and (tp <= here or config.rollout.engine in ("transformers", "sglang")):
        yield from stays_in_a_node("rollout.tp", tp, devices, here)
    elif size <= here:
        if devices > here and here % size:
            what = f"does not divide the {here} devices of a node: some engines would have parts of two nodes"
            yield _size_problem(config, what, _near_sizes(config, here))
    elif size % here:
        what = f"is more than the {here} devices of a node: an engine over several nodes takes all devices of each"
        yield _size_problem(config, what, near_multiples(size, here if size == tp else math.lcm(here, tp)))
    elif max(tp, here) % min(tp, here):
        what = f"{tp} tensor ranks of a stage would have parts of two nodes with {here} devices each"
        yield problem("rollout.tp", what, nearest("rollout.tp", near_divisors(tp, here)))
    if config.rollout.replicas is not None and devices > here and (rest := devices % here) % min(size, here):
        what = (
            f"{devices} devices with {here} per node leave {rest} on a node: an engine with {size} might get parts of "
            "two"
        )
        fix = nearest(f"placement.pools.{pool}", near_multiples(devices, size))
        yield problem(f"placement.pools.{pool}", what, fix)


def _near_sizes(config: Config, total: int) -> list[int]:
    return near_divisors(config.rollout.num_devices, total, config.rollout.tp if config.rollout.pp > 1 else 1)


def _size_problem(config: Config, what: str, sizes: list[int]) -> Problem:
    """Return a problem of the number of devices of an engine, with other numbers that would work."""
    tp, pp = config.rollout.tp, config.rollout.pp
    if pp == 1:
        key, value = ("rollout.tp", tp) if config.rollout.dp == 1 else ("rollout.dp", config.rollout.num_devices)
        return problem(key, f"{value} {what}", nearest(key, sizes))
    what = f"{pp} stages of {tp} devices: {tp * pp} {what}"
    return problem("rollout.pp", what, nearest("rollout.pp", [size // tp for size in sizes]))


def _data_parallel(config: Config) -> Iterator[Problem]:
    """Yield a problem for each setting that engines with data-parallel attention do not support."""
    rollout, lora = config.rollout, config.actor.lora
    if rollout.dp == 1:
        return
    if rollout.engine != "vllm":
        what = f"{rollout.dp}, but engines of {rollout.engine} have no data-parallel ranks"
        yield problem("rollout.dp", what, "rollout.dp=1, or rollout.engine=vllm")
    if rollout.tp * rollout.pp > 1:
        what = f"{rollout.dp} together with tp {rollout.tp} and pp {rollout.pp} has not been compared"
        yield problem("rollout.dp", what, "rollout.tp=1 and rollout.pp=1, or rollout.dp=1")
    if not rollout.vllm.get("enable_expert_parallel"):
        key = "rollout.vllm.enable_expert_parallel"
        yield problem(key, f"not true: {rollout.dp} data-parallel ranks share whole experts", f"{key}=true")
    quantization = rollout.vllm.get("quantization")
    reasons = {
        "actor.lora.sync": (lora is not None and lora.sync == "adapters", "adapters next to experts have", "merged"),
        "rollout.vllm.quantization": (quantization is not None, f"experts in {quantization} have", "null"),
    }
    for key, (is_set, untested, fix) in reasons.items():
        if is_set:
            what = f"{untested} not been compared in engines with {rollout.dp} data-parallel ranks"
            yield problem(key, what, f"{key}={fix}, or rollout.dp=1")


def _stages(config: Config) -> Iterator[Problem]:
    """Yield a problem for each setting that engines with several stages do not support."""
    pp = config.rollout.pp
    if pp == 1:
        return
    if config.rollout.engine != "vllm":
        what = f"{pp}, but engines of {config.rollout.engine} have no stages"
        yield problem("rollout.pp", what, "rollout.pp=1, or rollout.engine=vllm")
    if config.algorithm.router_replay == "R3":
        what = f"R3, but vLLM does not return routes from engines with {pp} stages"
        yield problem("algorithm.router_replay", what, "rollout.pp=1, or algorithm.router_replay=R2")


def _sampled_ahead(config: Config) -> Iterator[Problem]:
    ahead = f"{config.asynchrony.ahead} batches ahead"
    for name, everything in (("top_p", 1), ("top_k", 0)):
        if (actual := getattr(config.rollout, name)) != everything and not config.algorithm.keep_sampling_mask:
            what = f"{actual}: {ahead} are weighted by log-probs that are not those of the sampling distribution"
            fix = f"rollout.{name}={everything}, algorithm.keep_sampling_mask=true, or asynchrony.ahead=0"
            yield problem(f"rollout.{name}", what, fix)
