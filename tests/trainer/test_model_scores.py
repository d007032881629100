"""Reward models' scores in a batch: what they are given, what becomes of what they say, and what is kept of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mrl.config.agent import AgentConfig, EnvironmentConfig
from mrl.config.data import DataConfig
from mrl.config.reward import ModelScoreConfig
from mrl.data.chat import load_tokenizer
from mrl.data.conversation import ResponseEncoder
from mrl.demo.model import save_toy_tokenizer
from mrl.errors import DataError, ModelError, RewardError
from mrl.protocol import DataProto
from mrl.trainer.checks import check_reward_models
from mrl.trainer.generation import ScoredBatch
from mrl.trainer.model_scores import ModelScores, ScoringModel, scoring_models
from tests.data.test_response_text import other_tokenizer
from tests.trainer.fakes import SCORER, make_config

NO_CLIENT: Any = None


def samples(num: int = 3) -> ScoredBatch:
    scores = torch.tensor([1.0, 0.0, 0.25][:num], dtype=torch.float64)
    texts = {"uid": ["a", "a", "b"][:num], "response_text": ["one", "two", "three"][:num]}
    truncated = torch.tensor([False, False, True][:num])
    batch = DataProto.from_dict({"scores": scores, "truncated": truncated}, texts, row_ids=[7, 8, 9][:num])
    return ScoredBatch(batch, {"reward/score/mean": 5 / 12})


def models_that_say(said: list[float], *settings: ModelScoreConfig, journal: list[str] | None = None) -> ModelScores:
    """One model, or several with names, which say these numbers of the rows."""
    journal = [] if journal is None else journal

    def compute_rm_score(batch: DataProto) -> DataProto:
        journal.append("score")
        return batch.with_column("rm_scores", torch.tensor(said[: len(batch)]))

    client: Any = SimpleNamespace(compute_rm_score=compute_rm_score, capacity=8)
    roles = ["reward_model"] if len(settings) == 1 else [f"reward_models.{name}" for name in "xyz"[: len(settings)]]
    found = [ScoringModel(role, config, client, None) for role, config in zip(roles, settings, strict=True)]
    return ModelScores(found, pause=lambda: journal.append("pause"))


def test_scores_are_added_and_both_parts_stay_visible() -> None:
    journal: list[str] = []
    scored = models_that_say([-1.0, 4.0, 2.0], ModelScoreConfig(weight=0.5), journal=journal).add(samples())
    assert journal == ["pause", "score"], "engines are away first"
    assert scored.batch["scores"].tolist() == [1.0 - 0.5, 0.0 + 2.0, 0.25 + 1.0]
    assert scored.batch["scores"].dtype == torch.float64
    assert scored.batch["reward_model"].tolist() == [-1.0, 4.0, 2.0], "for samples/"
    assert scored.metrics["reward/score/mean"] == 5 / 12
    assert scored.metrics["reward/model/mean"] == pytest.approx(5 / 3)
    assert (scored.metrics["reward/model/min"], scored.metrics["reward/model/max"]) == (-1.0, 4.0)
    assert not any("scaled" in name for name in scored.metrics), "nothing is done with them"


def test_without_a_model_samples_stay_as_they_are_and_engines_awake() -> None:
    given, journal = samples(), list[str]()
    assert ModelScores([], pause=lambda: journal.append("pause")).add(given) is given
    assert not journal


def test_several_models_are_added_by_their_weights() -> None:
    models = models_that_say([1.0, 2.0, 4.0], ModelScoreConfig(weight=0.5), ModelScoreConfig(weight=-2.0, mean=1.0))
    scored = models.add(samples())
    wanted = [1.0 + 0.5 - 0.0, 0.0 + 1.0 - 2.0, 0.25 + 2.0 - 6.0]
    assert scored.batch["scores"].tolist() == wanted
    assert scored.metrics["reward/x/mean"] == scored.metrics["reward/y/mean"] == pytest.approx(7 / 3)
    assert scored.metrics["reward/y/scaled_mean"] == pytest.approx(4 / 3)


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
def test_a_score_that_is_no_number_names_its_sample(score: float) -> None:
    with pytest.raises(RewardError, match=f"sample 8 of prompt a a score of {score}; response 'two'") as caught:
        models_that_say([0.0, score, 0.0], ModelScoreConfig()).add(samples())
    assert caught.value.where == "reward_model"
    assert caught.value.fix


def test_scores_are_normalized_cut_and_weighed_in_this_order() -> None:
    config = ModelScoreConfig(mean=2.0, std=4.0, clip=1.5, weight=10.0)
    scored = models_that_say([10.0, 0.0, -20.0], config).add(samples())
    assert scored.batch["scores"].tolist() == [1.0 + 15.0, 0.0 - 5.0, 0.25 - 15.0]
    assert scored.metrics["reward/model/clipped_share"] == pytest.approx(2 / 3)
    assert scored.metrics["reward/model/scaled_mean"] == pytest.approx((1.5 - 0.5 - 1.5) / 3)
    assert scored.metrics["reward/model/mean"] == pytest.approx(-10 / 3), "the model's raw score"


def test_a_response_that_was_cut_off_may_be_scored_by_rule() -> None:
    config = ModelScoreConfig(running=True, truncated_score=-3.0, weight=2.0)
    models = models_that_say([1.0, 3.0, 999.0], config)
    scored = models.add(samples(), learn=True)
    assert scored.batch["scores"].tolist() == [1.0 - 2.0, 0.0 + 2.0, 0.25 - 6.0]
    assert scored.metrics["reward/model/truncated_share"] == pytest.approx(1 / 3)
    assert scored.metrics["reward/model/running_mean"] == 2.0, "samples without a score are not learned from"


def test_running_mean_and_spread_are_those_of_all_scores() -> None:
    chance = np.random.default_rng(0)
    scale, seen = ScoringModel("", ModelScoreConfig(running=True), NO_CLIENT), np.zeros(0)
    for num in (5, 1, 64, 3):
        some = chance.normal(7.0, 3.0, num)
        seen = np.concatenate([seen, some])
        scale.learn(some)
        found, figures = scale.scaled(some)
        assert found == pytest.approx((some - seen.mean()) / (seen.std() or 1.0), abs=1e-12)
        assert (figures["running_mean"], figures["running_std"]) == pytest.approx((seen.mean(), seen.std()), abs=1e-12)
    scale.learn(np.zeros(0))
    assert scale.state_dict()["num"] == 73
    alike = ScoringModel("", ModelScoreConfig(running=True), NO_CLIENT)
    alike.learn(np.full(4, 2.5))
    assert alike.scaled(np.full(4, 2.5))[0].tolist() == [0.0] * 4, "equal scores become 0"


def test_a_resumed_run_scores_to_the_bit_as_if_it_had_not_stopped() -> None:
    said, config = [0.1, 0.7, -1.3], ModelScoreConfig(running=True)
    models = models_that_say(said, config)
    models.add(samples(), learn=True)
    resumed = models_that_say(said, config)
    resumed.load_state_dict(json.loads(json.dumps(models.state_dict())))
    assert torch.equal(
        resumed.add(samples(2), learn=True).batch["scores"], models.add(samples(2), learn=True).batch["scores"]
    )
    assert resumed.state_dict() == models.state_dict()
    models_that_say(said, config).load_state_dict({})  # of a run without it


def files_of(directory: Path, name: str, vocab: int = 262) -> Path:
    """The tokenizer and the shape of a model."""
    from transformers import Qwen3Config

    path = directory / name
    save_toy_tokenizer(path)
    config = Qwen3Config(vocab_size=vocab, hidden_size=32, num_hidden_layers=1)
    (path / "config.json").write_text(json.dumps(config.to_dict()))
    return path


def config_of(policy: Path, scorer: Path, **sections: Any) -> Any:
    config = make_config(policy.parent, reward_model=replace(SCORER, path=str(scorer)), **sections)
    return replace(config, model=replace(config.model, path=str(policy)))


@pytest.mark.parametrize(("known", "refused"), [(261, True), (262, False), (263, False)])
def test_a_scorer_knows_every_token_that_the_policy_writes(known: int, refused: bool, tmp_path: Path) -> None:
    policy, scorer = files_of(tmp_path, "policy", 262), files_of(tmp_path, "scorer", known)
    tokenizer, config = load_tokenizer(str(policy)), config_of(policy, scorer)
    if not refused:
        assert list(check_reward_models(config, tokenizer)) == []
        return
    with pytest.raises(ModelError, match="has embeddings for 261 tokens, but the policy writes 262"):
        list(check_reward_models(config, tokenizer))


def test_a_scorer_with_other_tokens_is_given_texts_which_is_said(tmp_path: Path) -> None:
    policy, scorer = files_of(tmp_path, "policy"), other_tokenizer(tmp_path / "scorer")
    tokenizer, config = load_tokenizer(str(policy)), config_of(policy, scorer)
    ((role, said),) = check_reward_models(config, tokenizer)
    assert role == "reward_model"
    assert f"{scorer} reads texts, tokenized again with its own tokenizer and template: " in said
    (model,) = scoring_models(config, {"reward_model": None}, tokenizer)
    assert model.encoder is not None
    (same,) = scoring_models(config_of(policy, policy), {"reward_model": None}, tokenizer)
    assert same.encoder is None, "token ids go over as they were sampled"
    agent = AgentConfig(environments={"shop": EnvironmentConfig(name="a:b")})
    with pytest.raises(ModelError, match="conversations with environments are token ids") as caught:
        list(check_reward_models(replace(config, agent=agent), tokenizer))
    assert caught.value.fix == "choose a reward model with the policy's tokenizer"
    (scorer / "chat_template.jinja").unlink()
    with pytest.raises(DataError, match="has no chat template"):
        list(check_reward_models(config, tokenizer))


def test_texts_go_over_by_rows_and_what_does_not_fit_is_named(tmp_path: Path) -> None:
    given: list[DataProto] = []

    def compute_rm_score(batch: DataProto) -> DataProto:
        given.append(batch)
        return batch.with_column("rm_scores", torch.tensor([1.0, 2.0, 3.0]))

    encoder = ResponseEncoder(str(other_tokenizer(tmp_path / "scorer")), DataConfig(train={}))
    client: Any = SimpleNamespace(compute_rm_score=compute_rm_score, capacity=30)
    model = ScoringModel("reward_models.x", ModelScoreConfig(), client, encoder)
    found = samples()
    batch = found.batch.with_column("messages", [({"role": "user", "content": text},) for text in ("1", "2", "3")])
    ModelScores([model]).add(replace(found, batch=batch))
    (rows,) = given
    assert rows.row_ids.tolist() == [7, 8, 9]
    assert rows.lengths("responses").tolist() == [4, 3, 5], "a cut response has no end token"
    long = batch.with_column("response_text", ["one", "two and more", "three"])
    with pytest.raises(
        RewardError, match=r"sample 8 of prompt a has 32 tokens with the reward model's tokenizer; .* holds 30"
    ) as caught:
        ModelScores([model]).add(replace(found, batch=long))
    assert (caught.value.where, caught.value.fix) == (
        "reward_models.x",
        "increase reward_models.x.max_tokens_per_device",
    )
