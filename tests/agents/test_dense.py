"""Dense retrieval with a tiny encoder: prefixes, mean pooling and ranking, compared with the formula in float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from mrl.agents.dense import DenseIndex
from mrl.errors import SetupError
from tests.data.chat_templates import save_tokenizer

TEXTS = ["Ada\nShe wrote notes.", "Rome\nA city.", "A much longer passage of many words, so that others are padded."]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import BertConfig, BertModel

    directory = Path(tmp_path_factory.mktemp("encoder")) / "bert"
    tokenizer = save_tokenizer("qwen2.5", directory)
    tokenizer.pad_token = tokenizer.eos_token  # type: ignore[attr-defined]
    tokenizer.save_pretrained(directory)  # type: ignore[attr-defined]
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = BertModel(BertConfig(vocab_size=max(tokenizer.get_vocab().values()) + 1, **sizes))
    model.save_pretrained(directory)
    return directory


def vector(encoder: Path, text: str) -> np.ndarray:
    """The text alone, without padding."""
    from transformers import AutoTokenizer, BertModel

    ids = AutoTokenizer.from_pretrained(encoder)(text, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        mean = BertModel.from_pretrained(encoder).eval()(ids).last_hidden_state[0].double().mean(0).numpy()
    return mean / np.linalg.norm(mean)  # type: ignore[no-any-return]


def test_the_cpu_is_used_unless_a_device_is_named(encoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs of the machine may be those of a run."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert [place for place, _ in DenseIndex(encoder, TEXTS).find(["city"], 1)[0]] == [1]


@pytest.mark.parametrize("device", ["cuda", "cuda:3", "gpu", "cuda:x", "meta"])
def test_a_device_that_is_not_there_is_a_message(encoder: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(SetupError, match=f'device is "{device}", but this machine has 0 GPUs'):
        DenseIndex(encoder, TEXTS, device)


def test_passages_are_ranked_by_the_inner_product_of_unit_vectors(encoder: Path) -> None:
    index = DenseIndex(encoder, TEXTS)
    queries = ["who wrote notes?", "city"]
    passages = index.find(queries, 2)
    for query, ranked in zip(queries, passages, strict=True):
        scores = [vector(encoder, f"query: {query}") @ vector(encoder, f"passage: {text}") for text in TEXTS]
        best = sorted(range(3), key=lambda place: -scores[place])[:2]
        assert [place for place, _ in ranked] == best
        assert [score for _, score in ranked] == pytest.approx([scores[place] for place in best], abs=1e-5)
    assert [len(ranked) for ranked in index.find(["a"], 99)] == [3]
