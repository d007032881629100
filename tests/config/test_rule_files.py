"""Each file of rules only reports keys of its sections, so the name of a file shows which rules it has."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from mrl.config import rules
from mrl.config.resolved.load import load_config, load_config_of
from mrl.config.rules.problems import problem
from mrl.errors import ConfigError, Problem
from tests.config import test_preference_rules, test_wrong_configs

SECTIONS = {
    "agent": {"agent"},
    "algorithm": {"algorithm"},
    "asynchrony": {"asynchrony"},
    "batch": {"batch"},
    "cluster": {"cluster", "placement"},
    "data": {"data"},
    "judge": {"judge"},
    "preference": {"reward", "preference"},
    "reward": {"reward", "reward_model", "reward_models", "validation.reward_functions"},
    "reward_options": {"reward", "validation.reward_functions"},
    "roles": {"actor", "critic", "reference", "reward_model", "reward_models", "teacher"},
    "rollout": {"rollout"},
    "training": {"training"},
    "validation": {"validation"},
}
OF_ALL_SECTIONS = {"components", "model_shape", "passthrough"}
SHARED = {"check", "problems"}


def test_every_file_has_sections() -> None:
    files = {file.stem for file in Path(rules.__path__[0]).glob("*.py")} - {"__init__"}
    assert files == SECTIONS.keys() | OF_ALL_SECTIONS | SHARED


def test_a_file_reports_the_keys_of_its_sections(
    valid: str, write: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: dict[str, set[str]] = {name: set() for name in SECTIONS}

    def recorded(name: str, key: str, what: str, fix: str = "") -> Problem:
        reported[name].add(key)
        return problem(key, what, fix)

    for name in SECTIONS:
        monkeypatch.setattr(importlib.import_module(f"mrl.config.rules.{name}"), "problem", partial(recorded, name))
    for case in test_wrong_configs.CASES:
        text = valid
        for old, new in case.get("edits", {}).items():
            text = text.replace(old, new)
        with suppress(ConfigError):
            load_config(write(text), case.get("overrides", []))
    for overrides in (["asynchrony.ahead=1"], ["asynchrony.cache=keep"], ["asynchrony.ahead=1", "rollout.top_k=5"]):
        with suppress(ConfigError):
            load_config(write(valid), overrides)
    for case in test_preference_rules.CASES:
        with suppress(ConfigError):
            load_config_of(case["verb"], test_preference_rules.PATHS[case["verb"]], case["overrides"])
    for name, keys in reported.items():
        assert keys, f"no wrong configuration breaks a rule of {name}.py"
        others = {key for key in keys if not any(f"{key}.".startswith(f"{section}.") for section in SECTIONS[name])}
        assert not others, f"{name}.py reports keys of other sections"
