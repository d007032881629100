"""Wrong configurations of `mrl rm` and `mrl dpo`, each with its exact messages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from mrl.config.arithmetic import role_batch, tokens_limit
from mrl.config.resolved.load import load_any_config, load_config_of
from mrl.config.resolved.render import render
from mrl.config.sft import DpoConfig, RmConfig, SftConfig
from mrl.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"
PATHS = {verb: str(CONFIGS / f"laptop-{name}.yaml") for verb, name in (("rm", "rm"), ("dpo", "dpo"), ("sft", "sft"))}
PATHS["train"] = str(CONFIGS / "laptop-ppo.yaml")
CASES: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("wrong_preferences.yaml").read_text())


def problems_of(verb: str, path: str, overrides: list[str]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config_of(verb, path, overrides)
    assert caught.value.exit_code == 2
    return [str(replace(problem, where="")).removeprefix(": ") for problem in caught.value.problems]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["case"])
def test_message(case: dict[str, Any]) -> None:
    assert problems_of(case["verb"], PATHS[case["verb"]], case["overrides"]) == case["problems"]


@pytest.mark.parametrize(
    ("verb", "of", "more"),
    [
        *(("train", "rm", ""), ("sft", "dpo", ""), ("rm", "train", "")),
        *(("rm", "sft", ", or add the section reward"), ("dpo", "sft", ", or add the section preference")),
    ],
)
def test_a_configuration_of_another_command(verb: str, of: str, more: str) -> None:
    (problem,) = problems_of(verb, PATHS[of], [])
    assert problem == f"this is a configuration of `mrl {of}`, not of `mrl {verb}` (mrl {of} {PATHS[of]}{more})"


@pytest.mark.parametrize(("verb", "kind"), [("sft", SftConfig), ("rm", RmConfig), ("dpo", DpoConfig)])
def test_what_is_shown_loads_as_the_same(verb: str, kind: type, tmp_path: Path) -> None:
    resolved = load_any_config(PATHS[verb])
    (tmp_path / "shown.yaml").write_text(render(resolved))
    assert isinstance(resolved.config, kind)
    assert load_any_config(str(tmp_path / "shown.yaml")).config == resolved.config


def test_a_list_of_others_and_regression_need_no_more_than_they_read() -> None:
    regression = ["reward={loss: regression, centering: 0}"]
    for part in ("train", "validation"):
        regression += [f"data.{part}.sums.columns={{rejected: null, label: score, ability: null}}"]
    assert load_config_of("rm", PATHS["rm"], [*regression, "actor.max_tokens_per_device=320"]).config


@pytest.mark.parametrize(
    ("verb", "overrides", "longest"),
    [
        *(("rm", [], 640), ("dpo", [], 640), ("sft", [], 320)),
        (
            "rm",
            [
                "reward={loss: regression, centering: 0}",
                *(f"data.{part}.sums.columns={{rejected: null, label: x}}" for part in ("train", "validation")),
            ],
            320,
        ),
    ],
    ids=["rm", "dpo", "sft", "regression"],
)
def test_a_pair_is_planned_as_what_no_micro_batch_cuts(verb: str, overrides: list[str], longest: int) -> None:
    config = load_config_of(verb, PATHS[verb], overrides).config
    assert tokens_limit(config) == longest
    share = role_batch(config, "actor")
    assert share.max_micro_batches == -(-share.samples_per_rank // (1024 // longest))
