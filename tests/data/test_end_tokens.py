"""The tokens that end a response, and the files that name them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mrl.config.schema import RolloutConfig
from mrl.data.chat import ChatTokenizer, end_tokens, model_end_tokens
from mrl.errors import DataError


def rollout(**settings: Any) -> RolloutConfig:
    return RolloutConfig(max_prompt_tokens=8, max_response_tokens=8, **settings)


@pytest.mark.parametrize(
    ("written", "expected"),
    [(9, [9]), ([11, 9], [9, 11]), (None, None), ([], None), ("nine", None)],
    ids=repr,
)
def test_generation_config_names_one_or_several(
    written: Any, expected: list[int] | None, tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": written}))
    ids = end_tokens(tokenizer, str(tmp_path), rollout())
    assert ids.pop("tokenizer") == [tokenizer.eos_token_id]
    assert ids == ({} if expected is None else {"generation_config.json": expected})


def test_the_configuration_adds_its_own_or_has_them_alone(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    both = end_tokens(tokenizer, str(tmp_path), rollout(stop_token_ids=[5]))
    assert both == {"rollout.stop_token_ids": [5], "tokenizer": [tokenizer.eos_token_id]}
    assert model_end_tokens(tokenizer, str(tmp_path)) == {"tokenizer": [tokenizer.eos_token_id]}
    alone = end_tokens(tokenizer, str(tmp_path), rollout(stop_token_ids=[5], ignore_eos=True))
    assert alone == {"rollout.stop_token_ids": [5]}


def test_what_cannot_end_a_response_is_refused(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    size = len(tokenizer.get_vocab())
    with pytest.raises(DataError, match=f"token {size} does not exist: the tokenizer has {size} tokens"):
        end_tokens(tokenizer, str(tmp_path), rollout(stop_token_ids=[size]))
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(DataError, match="not JSON"):
        end_tokens(tokenizer, str(tmp_path), rollout())
