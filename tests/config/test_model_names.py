"""The models of a run are located and recorded before it starts, and stay the same when it continues."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import constants

from mrl.config.resolved.load import Resolved, in_directories, load_config, load_config_of, settle_models
from mrl.config.resolved.run_directory import open_run_directory
from mrl.config.schema import Config
from mrl.errors import ConfigError, ModelError
from tests.hub import make_hub_cache

NAME = "tiny/model"
REWARD_MODEL = ["reward_model={path: tiny/judge@v1, max_tokens_per_device: 512}", "placement.roles.reward_model=train"]


def make_model(directory: Path, heads: int) -> Path:
    directory.mkdir()
    sizes = {"num_hidden_layers": 2, "num_attention_heads": heads, "num_key_value_heads": heads}
    (directory / "config.json").write_text(json.dumps(sizes))
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def begin(resolved: Resolved[Config]) -> Path:
    with open_run_directory(resolved, may_go_on=True) as directory:
        return directory


def test_every_name_becomes_a_commit_and_every_commit_a_directory(
    cache: Path, valid: str, write: Callable[..., str], tmp_path: Path
) -> None:
    policy = make_hub_cache(cache, NAME, make_model(tmp_path / "policy", 4))
    judge = make_hub_cache(cache, "tiny/judge", make_model(tmp_path / "judge", 4), "v1")
    resolved = load_config(write(valid), ["model.critic=policy", *REWARD_MODEL])
    settled = settle_models(resolved)
    config = settled.config
    assert config.reward_model is not None
    assert config.model.path == f"{NAME}@{policy.name}"
    assert (config.model.critic, config.reward_model.path) == ("policy", f"tiny/judge@{judge.name}")
    assert settled.models == {
        "model.path": {"name": NAME, "revision": policy.name, "directory": str(policy)},
        "model.critic": {"name": "policy", "revision": None, "directory": str(tmp_path / "policy")},
        "reward_model.path": {"name": "tiny/judge@v1", "revision": judge.name, "directory": str(judge)},
    }
    local = in_directories(config)
    assert local.reward_model is not None
    assert (local.model.path, local.model.critic) == (str(policy), str(tmp_path / "policy"))
    assert local.reward_model.path == str(judge)
    directory = begin(settled)
    assert json.loads((directory / "models.json").read_text()) == settled.models
    assert (directory / "models.json").stat().st_mode & 0o777 == 0o600
    assert load_config(str(directory / "config.yaml")).config == config, "a run's own file names the commits"


def test_the_judge_has_a_commit_too(cache: Path, valid: str, write: Callable[..., str], tmp_path: Path) -> None:
    make_hub_cache(cache, NAME, make_model(tmp_path / "policy", 4))
    judge = make_hub_cache(cache, "tiny/judge", make_model(tmp_path / "judge", 4), "v1")
    asking = "reward.functions.judge={name: judge, options: {service: {max_tokens: 9}, template: '{response}'}}"
    placed = ["cluster.devices_per_node=5", "placement.pools.judge=1", "placement.roles.judge=judge"]
    config = settle_models(load_config(write(valid), ["judge.path=tiny/judge@v1", asking, *placed])).config
    assert config.judge is not None
    assert config.judge.path == f"tiny/judge@{judge.name}"
    local = in_directories(config).judge
    assert local is not None
    assert local.path == str(judge)


def test_a_run_that_goes_on_has_the_commit_that_it_began_with(
    cache: Path, valid: str, write: Callable[..., str], tmp_path: Path
) -> None:
    before = make_hub_cache(cache, NAME, make_model(tmp_path / "before", 4))
    begin(settle_models(load_config(write(valid))))
    after = make_hub_cache(cache, NAME, make_model(tmp_path / "after", 8))
    assert before != after
    resolved = load_config(write(valid))
    assert settle_models(resolved).config.model.path == f"{NAME}@{before.name}"
    assert begin(settle_models(resolved)).is_dir(), "it is this very run"
    other = load_config(write(valid), [f"model.path={NAME}@main"])
    assert settle_models(other).config.model.path == f"{NAME}@{after.name}", "another name is looked up again"
    anew = load_config(write(valid), ["run.name=other"])
    assert settle_models(anew).config.model.path == f"{NAME}@{after.name}"
    never = load_config(write(valid), ["training.resume=never"])
    assert settle_models(never).config.model.path == f"{NAME}@{after.name}"
    shutil.rmtree(before)
    with pytest.raises(ModelError, match=f"{NAME}@{before.name}: .* does not have it"):
        settle_models(resolved)
    Path("runs/demo/models.json").write_text("{")
    with pytest.raises(ConfigError, match=r"models\.json: run\.name: cannot read the models that the run recorded"):
        settle_models(resolved)


@pytest.mark.needs
def test_the_rules_see_a_model_as_soon_as_it_is_here(
    cache: Path, valid: str, write: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(valid)
    unseen = load_config(path)
    assert len(unseen.warnings) == 1
    make_hub_cache(cache, NAME, make_model(tmp_path / "even", 4))
    assert load_config(path).warnings == settle_models(unseen).warnings == ()
    shutil.rmtree(cache)
    make_hub_cache(cache, NAME, make_model(tmp_path / "odd", 3))
    with pytest.raises(ConfigError, match=r"run\.yaml:\d+: actor\.parallel\.tp: 2 does not divide 3 attention heads"):
        settle_models(unseen)


def test_sft_names_one_model(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    snapshot = make_hub_cache(cache, NAME, make_model(tmp_path / "made", 4))
    preset = Path(__file__).parents[2] / "configs" / "laptop-sft.yaml"
    settled = settle_models(load_config_of("sft", str(preset), [f"model.path={NAME}"]))
    assert settled.config.model.path == f"{NAME}@{snapshot.name}"
    assert in_directories(settled.config).model.path == str(snapshot)
