"""Parts of a configuration in a checkpoint, and a resumed run's warnings about changes."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

from mrl.config.algorithm import KlConfig
from mrl.config.schema import Config
from mrl.trainer.run import describe_changes, resume_config
from tests.trainer.fakes import make_config

LEARNT = {"model", "algorithm", "data", "batch", "actor", "critic", "reward_model", "reward_models", "teacher"}
LEARNT |= {"reference", "rollout", "agent", "asynchrony"}
MAY_CHANGE = {"run", "cluster", "deadlines", "placement", "training", "validation", "sync", "reward", "judge"}


def test_what_decides_what_is_learnt_is_held(tmp_path: Path) -> None:
    assert {each.name for each in fields(Config)} == LEARNT | MAY_CHANGE
    config = make_config(tmp_path)
    held = resume_config(config)
    assert set(held) == LEARNT
    assert held["actor"]["optimizer"] == {}
    assert held["batch"]["samples_per_update"] == 4
    assert json.loads(json.dumps(held)) == held


def test_secrets_are_not_held(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    source = replace(config.data.train["sums"], options={"api_key": "a-secret-value", "part": "train"})
    held = resume_config(replace(config, data=replace(config.data, train={"sums": source})))
    assert "a-secret-value" not in json.dumps(held)
    assert held["data"]["train"]["sums"]["options"]["part"] == "train"


def test_the_same_configuration_has_not_changed(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    before = resume_config(config)
    assert describe_changes(before, config, 7) == {}
    other = replace(config, training=replace(config.training, steps=99, seed=1), deadlines=replace(config.deadlines))
    assert describe_changes(before, other, 7) == {}, "how long it runs is not what it learns"


def test_every_change_is_named_by_its_key_and_first_step(tmp_path: Path) -> None:
    before = resume_config(make_config(tmp_path, actor={"optimizer": {"lr": 1e-3, "gone": 1}}))
    now = make_config(
        tmp_path,
        actor={"optimizer": {"lr": 1e-4, "new": 2}},
        algorithm={"kl": KlConfig(coef=0.5)},
    )
    assert describe_changes(before, now, 7) == {
        "actor.optimizer.lr": "was 0.001 when this run began, is 0.0001 from step 8 on",
        "actor.optimizer.gone": "was 1 when this run began, is None from step 8 on",
        "actor.optimizer.new": "was None when this run began, is 2 from step 8 on",
        "algorithm.kl.coef": "was 0.001 when this run began, is 0.5 from step 8 on",
    }
