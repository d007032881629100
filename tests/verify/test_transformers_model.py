"""A model computed layer by layer from its files equals transformers' own whole model."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from mrl.errors import ModelError
from mrl.models.families import FAMILIES
from mrl.models.table import Head
from mrl.verify import transformers_model
from mrl.verify.transformers_model import ModelAnswer, answer
from tests.models.tiny_models import TINY_FAMILIES, make_tiny

TOKENS = torch.arange(40) * 7 % 131


HEADS: list[tuple[str, Head]] = [(family, "lm") for family in TINY_FAMILIES]
HEADS += [(family, "score") for family in TINY_FAMILIES if FAMILIES[family.removesuffix("_tied")].has_score_head]


@pytest.mark.parametrize(("family", "head"), HEADS)
def test_layer_by_layer_is_the_whole_model(
    family: str, head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers_model, "_ROWS_AT_ONCE", 50)
    make_tiny(family, tmp_path, head=head, max_shard_size="100KB")
    assert (tmp_path / "model.safetensors.index.json").exists(), "a layer's tensors are in several files"
    found = answer(tmp_path, head, TOKENS)
    kind = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification
    model = kind.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        hidden = model.model(TOKENS[None]).last_hidden_state[0, :-1]
        if head == "lm":
            said = model.lm_head(hidden).log_softmax(-1).gather(1, TOKENS[1:, None])[:, 0]
            assert found.scores_T is not None
            torch.testing.assert_close(found.scores_T, said, atol=2e-5, rtol=0)
        else:
            assert found.scores_T is not None
            torch.testing.assert_close(found.scores_T, model.score(hidden)[:, 0], atol=2e-5, rtol=0)
    torch.testing.assert_close(found.hidden_TH, hidden, atol=2e-5, rtol=0)


def test_latents_have_the_epsilon_of_the_file_as_in_vllm(tmp_path: Path) -> None:
    config = json.loads((make_tiny("deepseek_v3", tmp_path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for layer in model.model.layers:
        for norm in (layer.self_attn.q_a_layernorm, layer.self_attn.kv_a_layernorm):
            norm.variance_epsilon = 0.1
    with torch.no_grad():
        hidden = model.model(TOKENS[None]).last_hidden_state[0, :-1]
    torch.testing.assert_close(answer(tmp_path, "lm", TOKENS).hidden_TH, hidden, atol=2e-5, rtol=0)


def test_a_model_below_a_new_score_head_has_no_values(tmp_path: Path) -> None:
    found = answer(make_tiny("llama", tmp_path), "score", TOKENS)
    assert found.scores_T is None


def test_tensors_that_transformers_misses_are_named(tmp_path: Path) -> None:
    file = make_tiny("llama", tmp_path) / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.2.mlp.down_proj.weight"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"missing keys in layer 2: layers\.0\.mlp\.down_proj\.weight"):
        answer(tmp_path, "lm", TOKENS)


def test_a_difference_is_of_what_the_head_says() -> None:
    exact = ModelAnswer(torch.ones(10, 4), torch.ones(10), score_norm=2.0)
    assert exact.difference(exact, "score", 0) == 0
    twice = replace(exact, scores_T=torch.full((10,), 2.0))
    assert exact.difference(twice, "score", 0) == pytest.approx(0.5), "relative to head and hidden states"
    assert exact.difference(twice, "lm", 0) == 1, "nats"
    far = torch.ones(10, 4)
    far[3] = 3.0
    assert exact.difference(replace(exact, hidden_TH=far), "score", 0) == pytest.approx(math.sqrt(0.4))
    assert exact.difference(replace(exact, hidden_TH=far), "score", 1) == 0, "a token at a tie, sent to another expert"
    far[3] = math.nan
    assert math.isnan(exact.difference(replace(exact, hidden_TH=far), "score", 1))


def test_log_probs_may_be_off_by_a_share_of_their_spread() -> None:
    said = ModelAnswer(torch.ones(2, 4), torch.tensor([-1.0, -5.0]))
    assert said.limit("lm", 2.0**-8, 16) == pytest.approx(6 / 2**8 * 4 * 2)
    assert said.limit("score", 2.0**-8, 16) == pytest.approx(6 / 2**8 * 4)
    alike = replace(said, scores_T=torch.tensor([-1.0, -1.0]))
    assert alike.limit("lm", 2.0**-8, 16) == pytest.approx(6 / 2**8 * 4 * 0.1)
