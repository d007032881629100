"""Rules for the section `asynchrony`: samples from older weights."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.arithmetic import has_own_rollout_pool
from mrl.config.rules.problems import problem
from mrl.config.schema import Config
from mrl.errors import Problem


def check_asynchrony(config: Config) -> Iterator[Problem]:
    """Yield settings that would learn wrongly from samples of older weights, or would not be faster."""
    asynchrony, in_flight = config.asynchrony, config.asynchrony.weights == "in_flight"
    if asynchrony.replay and not (asynchrony.ahead and in_flight):
        what = "has no effect unless weights arrive in flight: without that, the same configuration gives the same run"
        yield problem("asynchrony.replay", what, "asynchrony.replay=null, and the same seeds")
    if not asynchrony.ahead:
        for name, value, default in (("weights", "in_flight", "between"), ("cache", "keep", "null")):
            if getattr(asynchrony, name) == value:
                key, what = f"asynchrony.{name}", f"{value} has no effect without batches ahead"
                yield problem(key, what, f"asynchrony.ahead=1, or {key}={default}")
        return
    if in_flight:
        for conflict in _against_in_flight(config):
            yield problem(
                "asynchrony.weights", f"in_flight cannot be combined with {conflict}", "asynchrony.weights=between"
            )
    elif "actor" in config.placement.roles and not has_own_rollout_pool(config):
        what = "with weights `between` batches, none can be ahead: engines and actor take turns on the same devices"
        fix = (
            "use in_flight, which carries unfinished samples over, or a pool for the engines (placement.roles.rollout)"
        )
        yield problem("asynchrony.weights", what, fix)
    if asynchrony.cache == "keep" and not (in_flight and has_own_rollout_pool(config)):
        fix = "asynchrony.cache=null, or weights in flight and a separate pool for rollout"
        yield problem("asynchrony.cache", "the cache no longer exists when weights arrive", fix)


def _against_in_flight(config: Config) -> Iterator[str]:
    if config.algorithm.advantage == "remax":
        yield "algorithm.advantage=remax: its greedy answer would come from other weights"
    if config.algorithm.dynamic_sampling is not None:
        yield "algorithm.dynamic_sampling: which prompts are drawn for which batch would depend on how fast samples end"
    if config.agent.deterministic:
        yield "agent.deterministic=true: the seeds do not determine when weights arrive"
    if config.data.sampler != "shares" and config.scoring_models():
        yield "data.sampler and a reward model: the sampler sees only the scores of functions"
