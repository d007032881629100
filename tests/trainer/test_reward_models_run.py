"""Whole runs with reward models: real Ray, real Megatron, a real vLLM engine, models as small as they may be."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from mrl.demo.model import make_model
from mrl.events import Warned, read_events
from mrl.observe.metrics import read_metrics
from tests.apart import run_mrl, untimed
from tests.data.test_response_text import other_tokenizer
from tests.trainer.test_ppo import CONFIG

pytestmark = pytest.mark.slow

VALIDATED = (
    'data.validation.held={dataset: "toy:addition", options: {part: validation, largest: 19}}',
    "validation={every: 2, samples_per_prompt: 4, k: [2, 4], solved_at: 0.3}",
)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a run file, a policy, a reward model, and a reward model with another tokenizer."""
    directory = tmp_path_factory.mktemp("scored")
    model = make_model(directory / "model", seed=1)
    shutil.copytree(model, directory / "scorer")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        shape = AutoConfig.from_pretrained(model, num_labels=1)
        AutoModelForSequenceClassification.from_config(shape).save_pretrained(directory / "scorer")
        other_tokenizer(directory / "other")
        shape.vocab_size, shape.max_position_embeddings = 272, 128
        AutoModelForSequenceClassification.from_config(shape).save_pretrained(directory / "other")
    path = directory / "run.yaml"
    path.write_text(CONFIG.format(directory=directory / "runs", model=model))
    return path


def scorer(config: Path, name: str = "scorer", **more: Any) -> str:
    settings = {"path": str(config.parent / name), "dtype": "float32", "max_tokens_per_device": 128} | more
    return json.dumps(settings)


def train(config: Path, name: str, *overrides: str) -> list[dict[str, Any]]:
    """The metrics of a run without what only a clock decides."""
    run_mrl("train", str(config), f"run.name={name}", "training.save_every=0", *overrides)
    return untimed(config.parent / "runs" / name)


@pytest.fixture(scope="module")
def together(config: Path) -> list[dict[str, Any]]:
    """The metrics of actor, critic, reference and reward model on the same devices."""
    return train(config, "together", *four_roles(config), "placement.roles.reward_model=all")


def four_roles(config: Path) -> tuple[str, ...]:
    return (f"reward_model={scorer(config, weight=10, running=True)}", "training.steps=2", *VALIDATED)


PLACEMENTS = {
    "standalone": (
        "policy: 2, value: 2, engines: 1, scoring: 2, frozen: 2",
        "actor: policy, critic: value, rollout: engines, reward_model: scoring, reference: frozen",
    ),
    "hybrid": ("policy: 2, value: 2", "actor: policy, critic: value, reward_model: value"),
    "split": (
        "training: 2, engines: 1",
        "actor: training, critic: training, rollout: engines, reward_model: training",
    ),
}
"""Pools and roles: each role apart, the critic apart, the engines apart."""


@pytest.mark.parametrize(
    "name", ["standalone", *(pytest.param(name, marks=pytest.mark.on_demand) for name in ("hybrid", "split"))]
)
def test_four_roles_give_the_same_numbers_in_every_placement(
    name: str, config: Path, together: list[dict[str, Any]]
) -> None:
    pools, roles = PLACEMENTS[name]
    placement = f"placement={{pools: {{all: null, {pools}}}, roles: {{{roles}}}}}"
    other = train(config, f"rm-{name}", *four_roles(config), placement, "cluster.devices_per_node=9")
    assert [without_sync(line) for line in other] == [without_sync(line) for line in together]


def test_reward_model_critic_and_reference_have_their_parts(together: list[dict[str, Any]]) -> None:
    first, second = together[1:]
    assert first["reward/model/scaled_mean"] == pytest.approx(0.0, abs=1e-6), "the first scores are all there are"
    by_model = {"val/model/mean@4", "val/toy:addition/model/mean@4", "val/solved/best@2", "val/solved/best@4"}
    assert by_model <= together[0].keys()
    assert all(line["critic/loss"] > 0 for line in (first, second)), "the critic learns"
    assert first["reward/kl"] == pytest.approx(0.0, abs=1e-6)
    assert second["reward/kl"] != 0, "there is a reference"


def without_sync(metrics: dict[str, Any]) -> dict[str, Any]:
    """Leave out transfers: more crosses between ranks if the engines have their own devices."""
    return {name: value for name, value in metrics.items() if not name.startswith("sync/")}


@pytest.mark.on_demand
def test_rounds_and_greedy_answers_are_scored_between_generations(config: Path) -> None:
    """On the actor's devices, which the model has while engines sleep: the same as elsewhere."""
    common = (
        *("training.steps=2", "algorithm={advantage: remax, dynamic_sampling: {}}", "critic=null"),
        *("placement.roles.critic=null", f"reward_model={scorer(config, weight=10)}", "reward.functions.length=null"),
        *VALIDATED,
        'validation.reward_functions.length={name: "tests.trainer.rewards:shortness"}',
    )
    shared = train(config, "shared", *common, "placement.roles.reward_model=all")
    assert all(line["sampling/rounds"] == 1 for line in shared[1:]), "scores of a model differ"
    assert all("reward/greedy/mean" in line and "reward/score/mean" not in line for line in shared[1:])
    apart = ("placement.pools.scoring=2", "placement.roles.reward_model=scoring", "cluster.devices_per_node=4")
    assert [without_sync(line) for line in train(config, "apart", *common, *apart)] == [
        without_sync(line) for line in shared
    ]
    timed = read_metrics(config.parent / "runs" / "shared" / "metrics.jsonl")
    assert all(line["timing_s/reward_model"] > 0 for line in timed[1:])


@pytest.mark.on_demand
def test_two_models_one_of_which_has_other_tokens_and_a_resumed_run(config: Path) -> None:
    """The running mean is saved: a stopped and resumed run equals a whole one, bit for bit."""
    models = (
        f"reward_models.near={scorer(config, running=True, clip=1.5)}",
        f"reward_models.far={scorer(config, 'other', weight=-0.5, truncated_score=-1.0)}",
        "placement.roles={reward_models.near: all, reward_models.far: all}",
    )
    whole = train(config, "two", *models, "training={steps: 3, save_every: 1, keep: 9}")
    for line in whole:
        assert line["reward/far/min"] < line["reward/far/max"]
        assert 0 <= line["reward/near/clipped_share"] < 1
        assert 0 < line["reward/far/truncated_share"] <= 1
    warned = [record.event for record in read_events(config.parent / "runs" / "two" / "events.jsonl")]
    said = [each for each in warned if isinstance(each, Warned) and each.about == "reward_models.far"]
    assert len(said) == 1, "once, for all steps"
    assert "reads texts" in said[0].message
    again = config.parent / "runs" / "again"
    shutil.copytree(config.parent / "runs" / "two", again)
    for step in (2, 3):
        shutil.rmtree(again / "checkpoints" / f"step-{step:06d}")
    assert train(config, "again", *models, "training.steps=3") == whole


@pytest.mark.on_demand
def test_a_model_is_evaluated_by_a_reward_model_as_its_run_was(config: Path) -> None:
    """The engines have ended before it starts, on their devices."""
    common = (f"reward_model={scorer(config)}", "placement.roles.reward_model=all", *VALIDATED)
    (first, *_) = train(config, "validated", *common, "training.steps=1")
    file = config.parent / "eval.json"
    run_mrl("eval", str(config), *common, f"--output={file}")
    (result,) = json.loads(file.read_text())["results"]
    validated = {name: value for name, value in first.items() if name.startswith("val/")}
    assert validated["val/model/mean@4"] == pytest.approx(result["figures"]["val/model/mean@4"], abs=1e-6)
    assert result["figures"] == pytest.approx(validated, abs=1e-5)
