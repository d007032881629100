"""The nearest values that a rule proposes are always valid."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest

from mrl.config.resolved.load import load_config
from mrl.config.rules.problems import near_divisors, near_multiples, nearest
from mrl.errors import ConfigError

PROPOSAL = re.compile(r"(?:nearest|smallest): ([a-z_.]+)=([0-9]+)(?: or ([0-9]+))?$")


def problems(path: str, overrides: list[str]) -> dict[str, str]:
    """Return the problems by key, with their fixes."""
    try:
        load_config(path, overrides)
    except ConfigError as error:
        return {f"{problem.key}: {problem.what}": problem.fix for problem in error.problems}
    return {}


def test_near_values() -> None:
    assert near_multiples(56, 6) == [54, 60]
    assert near_multiples(59, 6) == [60, 54]
    assert near_multiples(2, 6) == [6]
    assert near_divisors(10, 32) == [8, 16]
    assert near_divisors(5, 12, step=3) == [6, 3]
    assert near_divisors(100, 12) == [12]
    assert near_divisors(1, 9, step=2) == []
    assert nearest("key", []) == ""
    assert nearest("key", [4, 8]) == "nearest: key=4 or 8"


@pytest.mark.parametrize("seed", range(2))
def test_a_proposed_value_puts_its_rule_right(seed: int, valid: str, write: Callable[..., str]) -> None:
    chance = random.Random(seed)
    path = write(valid)
    tried = 0
    for _ in range(12):
        overrides = [
            f"batch.prompts_per_step={chance.randint(1, 40)}",
            f"batch.samples_per_prompt={chance.randint(1, 8)}",
            f"batch.samples_per_update={chance.randint(1, 64)}",
            f"rollout.max_response_tokens={chance.choice([100, 900, 3000])}",
            f"rollout.tp={chance.randint(1, 5)}",
            f"actor.parallel.tp={chance.choice([1, 2, 4])}",
            f"critic.parallel={{tp: {chance.choice([1, 2])}, cp: {chance.choice([1, 2])}}}",
        ]
        for what, fix in problems(path, overrides).items():
            for key, *values in PROPOSAL.findall(fix):
                for value in filter(None, values):
                    tried += 1
                    left = problems(path, [*overrides, f"{key}={value}"])
                    assert not [other for other in left if same_rule(what, other)], (overrides, what, fix, left)
    assert tried > 18


def same_rule(what: str, other: str) -> bool:
    """Whether two problems are the same one with other numbers."""
    return re.sub(r"\d+", "", what) == re.sub(r"\d+", "", other)


def test_expert_layouts_divide_the_pool_with_etp() -> None:
    layout = ["cluster.devices_per_node=3", "placement.pools.laptop=3", "actor.parallel={tp: 1, etp: 2}"]
    with pytest.raises(ConfigError, match="etp x ep x pp = 2 does not divide the 3 devices"):
        load_config("configs/laptop-grpo.yaml", layout)


@pytest.mark.parametrize(
    "function",
    [
        "{name: digits, options: {partial: 0.5}}",
        "{name: countdown, options: {partial: 0}}",
        "{name: dapo, options: {boxed: true}, sources: [dapo, 'math/*']}",
        "{name: ifeval, options: {share: false}}",
        "{name: multiple_choice, options: {letters: ABCD}}",
        "{name: http, options: {url: 'http://host', attempts: 1, backoff_s: 0.5}}",
        "{name: judge, options: {template: '{response}', service: {url: 'http://host/v1', model: m, temperature: 1}}}",
        "{name: judge, options: {template: '{response}', service: {url: 'http://host/v1', model: m}, "
        "verdict: {pattern: '(yes|no)', values: {'yes': 1, 'no': -0.5}}}}",
        "{name: 'mine:score', group: true, sources: []}",
    ],
)
def test_options_that_are_right(function: str, valid: str, write: Callable[..., str]) -> None:
    assert problems(write(valid), [f"reward.functions.answer={function}"]) == {}
