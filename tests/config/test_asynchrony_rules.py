"""Settings of `asynchrony` that are errors before the start, each with its reason and a fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.config.arithmetic import cache_in_flight
from mrl.config.resolved.load import load_config
from mrl.config.schema import Config
from mrl.errors import ConfigError

ROOT = Path(__file__).parents[2]
APART = ("placement.pools={laptop: 2, engines: 2}", "placement.roles.rollout=engines", "cluster.devices_per_node=4")
WEIGHED = "algorithm.correction={level: token}"
MASKED = ("algorithm.keep_sampling_mask=true",)
IN_FLIGHT = "asynchrony={ahead: 2, weights: in_flight}"


def load(*overrides: str) -> Config:
    return load_config(str(ROOT / "configs" / "laptop-grpo.yaml"), overrides).config


@pytest.mark.parametrize(
    "right",
    [
        (*APART, WEIGHED, "asynchrony.ahead=1"),
        (*APART, WEIGHED, IN_FLIGHT),
        (*APART, WEIGHED, "asynchrony={ahead: 1, weights: in_flight, cache: keep}"),
        (WEIGHED, IN_FLIGHT),
        (*APART, WEIGHED, "asynchrony.ahead=1", "algorithm.advantage=remax"),
        (*APART, WEIGHED, "asynchrony.ahead=1", "rollout.top_k=40", "rollout.top_p=0.9", *MASKED),
        (*APART, WEIGHED, "asynchrony.ahead=1", "algorithm.dynamic_sampling={}"),
    ],
)
def test_what_is_right_is_taken(right: tuple[str, ...]) -> None:
    load(*right)


RECOMPUTE = "asynchrony={ahead: 1, weights: in_flight, cache: recompute}"


@pytest.mark.parametrize(
    ("given", "cache"),
    [
        ((*APART, WEIGHED, IN_FLIGHT), "keep"),
        ((*APART, WEIGHED, RECOMPUTE), "recompute"),
        ((WEIGHED, IN_FLIGHT), "recompute"),  # sleeping engines lose it
        ((*APART, WEIGHED, "asynchrony.ahead=1"), None),
        (("asynchrony.cache=recompute",), None),
    ],
)
def test_a_cache_is_kept_where_samples_are_weighed_and_engines_stay_awake(
    given: tuple[str, ...], cache: str | None
) -> None:
    assert cache_in_flight(load(*given)) == cache


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ((*APART, "asynchrony.ahead=1"), r"algorithm\.correction: 1 batches ahead: samples of older weights"),
        ((*APART, WEIGHED, "asynchrony.ahead=1", "rollout.top_p=0.9"), r"rollout\.top_p: 0\.9: .*rollout\.top_p=1"),
        ((*APART, WEIGHED, "asynchrony.ahead=1", "rollout.top_k=40"), r"rollout\.top_k: 40: .*rollout\.top_k=0"),
        (
            (WEIGHED, "asynchrony.ahead=1"),
            r"asynchrony\.weights: with weights `between` batches, none can be ahead.*in_flight",
        ),
        (("asynchrony.weights=in_flight",), r"asynchrony\.weights: in_flight has no effect without batches ahead"),
        (("asynchrony.cache=keep",), r"asynchrony\.cache: keep has no effect without batches ahead"),
        (
            (WEIGHED, "asynchrony={ahead: 1, weights: in_flight, cache: keep}"),
            r"asynchrony\.cache: the cache no longer",
        ),
        ((*APART, WEIGHED, "asynchrony={ahead: 1, cache: keep}"), r"asynchrony\.cache: the cache no longer exists"),
        (
            (*APART, WEIGHED, IN_FLIGHT, "algorithm.advantage=remax"),
            "in_flight cannot be combined with algorithm.advantage=remax: its",
        ),
        ((*APART, WEIGHED, IN_FLIGHT, "algorithm.dynamic_sampling={}"), "algorithm.dynamic_sampling: which prompts"),
        (
            (*APART, WEIGHED, IN_FLIGHT, "agent.deterministic=true"),
            "in_flight cannot be combined with agent.deterministic=true: the seeds",
        ),
        ((*APART, WEIGHED, "asynchrony.ahead=-1"), r"asynchrony\.ahead: must be at least 0"),
        ((*APART, WEIGHED, "asynchrony.weights=sometimes"), 'weights: "sometimes" is not one of between, in_flight'),
    ],
)
def test_what_is_wrong_says_why_and_what_would_do(wrong: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(*wrong)
