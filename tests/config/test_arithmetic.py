"""The numbers that follow from a configuration, computed by hand, and the limits of values in its rules."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from mrl.config.arithmetic import (
    has_own_rollout_pool,
    longest_sample_tokens,
    needs_old_log_probs,
    num_engines,
    role_batch,
    role_devices,
    role_mesh,
    rollout_devices,
    samples_per_step,
    updates_per_step,
)
from mrl.config.resolved.load import load_config
from mrl.config.schema import Config
from mrl.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"


def config_of(preset: str = "ppo-llama3.1-8b-1n8g", **changes: Any) -> Config:
    """Return a preset with other values: `actor__parallel__tp=2`."""
    overrides = [f"{key.replace('__', '.')}={value}" for key, value in changes.items()]
    return load_config(str(CONFIGS / f"{preset}.yaml"), overrides).config


BATCH = {"batch__prompts_per_step": 24, "batch__samples_per_prompt": 4, "batch__samples_per_update": 32}
LAYOUT = {
    **{f"{role}__parallel__{name}": 1 for role in ("actor", "critic") for name in ("tp", "pp", "cp")},
    **{f"{role}__parallel__sequence_parallel": "false" for role in ("actor", "critic")},
}


def test_a_step_is_its_prompts_samples_and_so_many_updates() -> None:
    config = config_of(**BATCH, batch__epochs_per_step=3)
    assert samples_per_step(config.batch) == 96
    assert updates_per_step(config.batch) == 9
    assert (
        longest_sample_tokens(config.rollout) == config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    )


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({}, False),
        ({"batch__samples_per_update": 48}, True),
        ({"batch__epochs_per_step": 2}, True),
        ({"algorithm__kl__where": "loss"}, False),
        ({"algorithm__kl__where": "reward"}, True),
        ({"algorithm__kl__where": "both"}, True),
        ({"algorithm__correction": "{level: token}"}, True),
    ],
    ids=str,
)
def test_old_log_probs_are_needed_where_the_policy_moves_or_something_reads_them(
    changes: dict[str, Any], needed: bool
) -> None:
    one_update = {**BATCH, "batch__samples_per_update": 96, "batch__epochs_per_step": 1, "algorithm__kl__where": "none"}
    assert needs_old_log_probs(config_of(**LAYOUT | one_update | {"algorithm__kl__target": "null"} | changes)) is needed


def test_a_trained_role_shares_an_update_and_a_frozen_one_a_step() -> None:
    changes = {
        **LAYOUT,
        **BATCH,
        "actor__parallel__cp": 2,
        "actor__max_tokens_per_device": 5000,
        "rollout__max_prompt_tokens": 1000,
        "rollout__max_response_tokens": 2000,
        "reward_model": "{path: meta-llama/Llama-3.1-8B, max_tokens_per_device: 3000}",
        "placement__roles__reward_model": "all",
    }
    config = config_of(**changes)
    actor, judge = role_batch(config, "actor"), role_batch(config, "reward_model")
    assert (actor.samples_per_rank, actor.tokens_per_micro_batch, actor.longest_sample_tokens) == (8, 10000, 3000)
    assert actor.max_micro_batches == math.ceil(8 / 3)
    assert (judge.samples_per_rank, judge.tokens_per_micro_batch, judge.max_micro_batches) == (12, 3000, 12)
    assert role_mesh(config, "actor").dp == 4
    assert role_devices(config, "reward_model") == 8


def test_engines_are_on_the_actors_devices_or_on_their_own() -> None:
    shared = config_of("grpo-qwen3-32b-4n8g")
    assert not has_own_rollout_pool(shared)
    assert not has_own_rollout_pool(config_of("grpo-qwen3-32b-4n8g", placement__roles__rollout="all"))
    assert (rollout_devices(shared), num_engines(shared)) == (32, 32 // shared.rollout.tp)
    changes = {
        "placement__pools": "{all: null, train: 16, engines: 8}",
        "placement__roles": "{actor: train, rollout: engines}",
        "rollout__tp": 2,
    }
    apart = config_of("grpo-qwen3-32b-4n8g", **changes)
    assert has_own_rollout_pool(apart)
    assert (rollout_devices(apart), num_engines(apart)) == (8, 4)
    assert num_engines(config_of("grpo-qwen3-32b-4n8g", **changes, rollout__replicas=3)) == 3


def refused(**changes: Any) -> set[str]:
    """Return the keys with problems in a configuration."""
    try:
        config_of(**changes)
    except ConfigError as error:
        return {problem.key for problem in error.problems}
    return set()


ROOM = {**LAYOUT, "rollout__max_prompt_tokens": 1000, "rollout__max_response_tokens": 2000}


@pytest.mark.parametrize(
    ("allowed", "beyond", "key"),
    [
        (
            {"actor__schedule": "{warmup_steps: 5, decay: linear, decay_steps: 6}"},
            {"actor__schedule": "{warmup_steps: 5, decay: linear, decay_steps: 5}"},
            "actor.schedule.decay_steps",
        ),
        (
            {**ROOM, "actor__max_tokens_per_device": 3000},
            {**ROOM, "actor__max_tokens_per_device": 2999},
            "actor.max_tokens_per_device",
        ),
        (
            {**ROOM, "actor__parallel__cp": 2, "actor__max_tokens_per_device": 1500},
            {**ROOM, "actor__parallel__tp": 2, "actor__max_tokens_per_device": 1500},
            "actor.max_tokens_per_device",
        ),
        (
            {**ROOM, "algorithm__overlong": "{buffer_tokens: 2000}"},
            {**ROOM, "algorithm__overlong": "{buffer_tokens: 2001}"},
            "algorithm.overlong.buffer_tokens",
        ),
        (
            {"rollout__tp": 2, "rollout__replicas": 4},
            {"rollout__tp": 2, "rollout__replicas": 5},
            "rollout.replicas",
        ),
        (
            {"algorithm__kl__where": "both", "algorithm__kl__target": 0.1},
            {"algorithm__kl__where": "loss", "algorithm__kl__target": 0.1},
            "algorithm.kl.target",
        ),
        (
            {**LAYOUT, **BATCH, "batch__samples_per_update": 8},
            {**LAYOUT, **BATCH, "batch__samples_per_update": 12},
            "batch.samples_per_update",
        ),
        (
            {**LAYOUT, **BATCH, "batch__samples_per_update": 8},
            {**LAYOUT, **BATCH, "batch__samples_per_update": 8, "batch__prompts_per_step": 25},
            "batch.prompts_per_step",
        ),
    ],
    ids=str,
)
def test_a_rule_allows_a_value_up_to_its_edge(allowed: dict[str, Any], beyond: dict[str, Any], key: str) -> None:
    assert key not in refused(**allowed)
    assert key in refused(**beyond)
