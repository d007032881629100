"""Rules of the section `asynchrony`: what would be learned wrong from samples of older weights, or not be faster."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.arithmetic import has_own_rollout_pool
from mrl.config.rules import problem
from mrl.config.schema import Config
from mrl.errors import Problem


def check_asynchrony_rules(config: Config) -> Iterator[Problem]:
    """Yield every problem of the section."""
    asynchrony = config.asynchrony
    if asynchrony.replay and not (asynchrony.ahead and asynchrony.weights == "in_flight"):
        what = "it is of no use where weights do not come in flight: the same configuration gives the same run"
        yield problem("asynchrony.replay", what, "asynchrony.replay=null, and the same seeds")
    if not asynchrony.ahead:
        for name, default in (("weights", "between"), ("cache", "recompute")):
            if (given := getattr(asynchrony, name)) != default:
                key, what = f"asynchrony.{name}", f"{given} means nothing where nothing is ahead"
                yield problem(key, what, f"asynchrony.ahead=1, or {key}={default}")
        return
    ahead = f"{asynchrony.ahead} batches ahead"
    if config.algorithm.correction is None:
        what = f"{ahead}: samples of older weights would be learned from as if the present ones had drawn them"
        yield problem("algorithm.correction", what, "algorithm.correction={level: token}, or asynchrony.ahead=0")
    for name, everything in (("top_p", 1), ("top_k", 0)):
        if (given := getattr(config.rollout, name)) != everything:
            what = f"{given}: {ahead} are weighed by log-probs of another distribution than that which is drawn from"
            yield problem(f"rollout.{name}", what, f"rollout.{name}={everything}, or asynchrony.ahead=0")
    if asynchrony.weights == "in_flight":
        yield from _in_flight(config)
    elif "actor" in config.placement.roles and not has_own_rollout_pool(config):
        what = "between batches nothing can be ahead: the engines take turns with the actor on the same devices"
        fix = "in_flight, which carries unfinished samples over, or a pool of their own (placement.roles.rollout)"
        yield problem("asynchrony.weights", what, fix)
    if asynchrony.cache == "keep" and not (asynchrony.weights == "in_flight" and has_own_rollout_pool(config)):
        what, fix = (
            "no cache is there any more when weights come",
            "recompute, or weights in flight and a pool for rollout",
        )
        yield problem("asynchrony.cache", what, f"asynchrony.cache={fix}")


def _in_flight(config: Config) -> Iterator[Problem]:
    algorithm = config.algorithm
    has_sampler = config.data.sampler != "shares" and bool(config.scoring_models())
    refused = (
        (algorithm.advantage == "remax", "algorithm.advantage=remax: its greedy answer would be of other weights"),
        (
            algorithm.dynamic_sampling is not None,
            "algorithm.dynamic_sampling: which prompts are drawn for which batch would depend on how fast samples end",
        ),
        (config.agent.deterministic, "agent.deterministic=true: when the weights come does not follow from the seeds"),
        (has_sampler, "data.sampler and a reward model: prompts are learned of by what functions alone score"),
    )
    for is_given, why in refused:
        if is_given:
            yield problem("asynchrony.weights", f"in_flight beside {why}", "asynchrony.weights=between")
