"""The presets of Search-R1: its limits, and the schedules that its paper gives as shares of the updates."""

from __future__ import annotations

import pytest

from mrl.config.arithmetic import updates_per_step
from mrl.config.resolved.load import load_config
from mrl.config.schema import Config
from tests.presets.twins import CONFIGS, presets
from tests.presets.whole import overrides

SEARCH_R1 = {name: config for name, config in presets().items() if isinstance(config, Config) and "search-r1" in name}


def test_there_is_one_for_each_size_and_algorithm() -> None:
    variants = {(config.model.path, config.algorithm.advantage) for config in SEARCH_R1.values()}
    assert variants == {(f"Qwen/Qwen2.5-{size}", algorithm) for size in ("3B", "7B") for algorithm in ("gae", "grpo")}


@pytest.mark.parametrize("name", SEARCH_R1)
def test_limits_and_schedules_are_those_of_the_paper(name: str) -> None:
    config = SEARCH_R1[name]
    environment, max_tokens = config.agent.environments["search"], config.rollout.max_response_tokens
    assert (environment.max_turns, environment.whole_response_tokens()) == (4 + 1, max_tokens)
    updates = config.training.steps * updates_per_step(config.batch)
    assert updates_per_step(config.batch) == 512 // 256
    assert config.actor.schedule.warmup_steps == pytest.approx(0.285 * updates)
    assert config.critic is None or config.critic.schedule.warmup_steps == pytest.approx(0.015 * updates)
    assert config.algorithm.kl.where == ("loss" if config.critic is None else "reward")


@pytest.mark.parametrize("name", SEARCH_R1)
def test_without_its_environment_it_is_a_run_that_a_laptop_starts(name: str) -> None:
    small = load_config(str(CONFIGS / f"{name}.yaml"), [*overrides(SEARCH_R1[name])]).config
    assert not small.agent.environments
