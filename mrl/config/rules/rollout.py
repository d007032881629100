"""Rules for the section `rollout`."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.rules.problems import near_divisors, near_multiples, nearest, problem, stays_in_a_node
from mrl.config.rules.sglang import check_sglang
from mrl.config.schema import Config
from mrl.errors import Problem


def check_rollout(config: Config) -> Iterator[Problem]:
    """Check that the engines fit on their devices, and that batches ahead are drawn from the whole distribution."""
    here, roles, pools = config.cluster.devices_per_node, config.placement.roles, config.placement.pools
    tp, replicas, role = config.rollout.tp, config.rollout.replicas, "rollout" if "rollout" in roles else "actor"
    if roles.get(role) in pools:
        devices = pools[roles[role]]
        yield from _engine_nodes(config, tp, devices, here, roles[role])
        pool = f"the {devices} devices of the pool of the {role}"
        if replicas is None and devices % tp:
            fix = nearest("rollout.tp", near_divisors(tp, devices))
            yield problem("rollout.tp", f"{tp} does not divide {pool}", fix)
        elif replicas is not None and replicas * tp > devices:
            fix = f"rollout.replicas={devices // tp}" if devices >= tp else f"rollout.tp={devices}"
            yield problem("rollout.replicas", f"{replicas} engines with {tp} devices each do not fit on {pool}", fix)
    if config.cluster.device == "cpu" and tp > 1 and config.rollout.vllm.get("enable_expert_parallel"):
        key = "rollout.vllm.enable_expert_parallel"
        what = f"true: vLLM's kernels for experts on a CPU ignore which experts a rank has, and crash with tp {tp}"
        yield problem(key, what, f"{key}=false, or rollout.tp=1")
    quantization = config.rollout.vllm.get("quantization") or config.rollout.vllm.get("quantization_config")
    if quantization and config.algorithm.correction is None:
        what = f"null: engines with {quantization} sample from other probabilities than the trainer's"
        fix = "algorithm.correction={upper: 2.0}, or rollout.vllm.quantization=null"
        yield problem("algorithm.correction", what, fix)
    if config.asynchrony.ahead:
        yield from _sampled_ahead(config)
    yield from check_sglang(config)


def _engine_nodes(config: Config, tp: int, devices: int, here: int, pool: str) -> Iterator[Problem]:
    """Yield a problem if an engine would have a part of a node and a part of another, or span nodes without vLLM."""
    if tp <= here or config.rollout.engine in ("transformers", "sglang"):
        yield from stays_in_a_node("rollout.tp", tp, devices, here)
    elif tp % here:
        what = f"{tp} is more than the {here} devices of a node: an engine over several nodes takes all devices of each"
        yield problem("rollout.tp", what, nearest("rollout.tp", near_multiples(tp, here)))
    if config.rollout.replicas is not None and devices > here and (rest := devices % here) % min(tp, here):
        what = (
            f"{devices} devices with {here} per node leave {rest} on a node: an engine with {tp} might get parts of two"
        )
        yield problem(f"placement.pools.{pool}", what, nearest(f"placement.pools.{pool}", near_multiples(devices, tp)))


def _sampled_ahead(config: Config) -> Iterator[Problem]:
    ahead = f"{config.asynchrony.ahead} batches ahead"
    for name, everything in (("top_p", 1), ("top_k", 0)):
        if (actual := getattr(config.rollout, name)) != everything:
            what = f"{actual}: {ahead} are weighted by log-probs that are not those of the sampling distribution"
            yield problem(f"rollout.{name}", what, f"rollout.{name}={everything}, or asynchrony.ahead=0")
