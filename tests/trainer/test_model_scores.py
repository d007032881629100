"""A reward model's scores in a batch."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mrl.data.chat import load_tokenizer
from mrl.data.toy_tokenizer import save_toy_tokenizer
from mrl.errors import ModelError, RewardError
from mrl.protocol import DataProto
from mrl.trainer.generation import ScoredBatch
from mrl.trainer.model_scores import add_model_scores, check_reward_model

CONFIG: Any = SimpleNamespace(reward_model=SimpleNamespace(weight=0.5))


def samples() -> ScoredBatch:
    scores = torch.tensor([1.0, 0.0, 0.25], dtype=torch.float64)
    texts = {"uid": ["a", "a", "b"], "response_text": ["one", "two", "three"]}
    return ScoredBatch(DataProto.from_dict({"scores": scores}, texts, row_ids=[7, 8, 9]), {"reward/score/mean": 5 / 12})


def written(*scores: float) -> DataProto:
    """What the workers answer, with the rows in another order."""
    return DataProto.from_dict({"rm_scores": torch.tensor(scores)}, row_ids=[9, 7, 8])


def test_scores_are_added_by_row_and_both_parts_stay_visible() -> None:
    scored = add_model_scores(CONFIG, samples(), written(2.0, -1.0, 4.0))
    assert scored.batch.row_ids.tolist() == [7, 8, 9]
    assert scored.batch["scores"].tolist() == [1.0 - 0.5, 0.0 + 2.0, 0.25 + 1.0]
    assert scored.batch["scores"].dtype == torch.float64
    assert "rm_scores" not in scored.batch.columns()
    assert scored.metrics["reward/score/mean"] == 5 / 12
    assert scored.metrics["reward/model/mean"] == pytest.approx(5 / 3)
    assert (scored.metrics["reward/model/min"], scored.metrics["reward/model/max"]) == (-1.0, 4.0)


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
def test_a_score_that_is_no_number_names_its_sample(score: float) -> None:
    with pytest.raises(RewardError, match=f"sample 8 of prompt a a score of {score}; response 'two'") as caught:
        add_model_scores(CONFIG, samples(), written(0.0, 0.0, score))
    assert caught.value.fix


def test_another_chat_template_is_warned_of(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("policy", "scorer")]
    for path in paths:
        save_toy_tokenizer(path)
        (path / "config.json").write_text(json.dumps(small_model()))
    policy, scorer = map(str, paths)
    config: Any = SimpleNamespace(model=SimpleNamespace(path=policy), reward_model=SimpleNamespace(path=scorer))
    tokenizer = load_tokenizer(policy)
    assert list(check_reward_model(config, tokenizer)) == []
    (paths[1] / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (warning,) = check_reward_model(config, tokenizer)
    assert warning.startswith(f"the chat template of {scorer} is not the policy's")


@pytest.mark.parametrize(("known", "refused"), [(261, True), (262, False), (263, False)])
def test_a_scorer_knows_every_token_that_the_policy_writes(known: int, refused: bool, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("policy", "scorer")]
    for path, vocab in zip(paths, (262, known), strict=True):
        save_toy_tokenizer(path)
        (path / "config.json").write_text(json.dumps(small_model(vocab)))
    policy, scorer = map(str, paths)
    config: Any = SimpleNamespace(model=SimpleNamespace(path=policy), reward_model=SimpleNamespace(path=scorer))
    tokenizer = load_tokenizer(policy)
    if not refused:
        assert list(check_reward_model(config, tokenizer)) == []
        return
    with pytest.raises(ModelError, match="has embeddings for 261 tokens, but the policy writes 262"):
        list(check_reward_model(config, tokenizer))


def test_without_a_reward_model_there_is_nothing_to_check() -> None:
    tokenizer: Any = None
    assert list(check_reward_model(SimpleNamespace(reward_model=None), tokenizer)) == []  # type: ignore[arg-type]


def test_scores_of_float32_are_added_in_float64() -> None:
    scored = add_model_scores(SimpleNamespace(reward_model=SimpleNamespace(weight=3.0)), samples(), written(0.1, 0, 0))  # type: ignore[arg-type]
    assert scored.batch["scores"].tolist() == [1.0, 0.0, 0.25 + 3.0 * float(torch.tensor(0.1))]


def small_model(vocab: int = 262) -> dict[str, Any]:
    from transformers import Qwen3Config

    return Qwen3Config(vocab_size=vocab, hidden_size=32, num_hidden_layers=1).to_dict()
