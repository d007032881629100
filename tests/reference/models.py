"""The smallest possible models: a policy, a critic, a reward model and a teacher with one vocabulary, and a `foreign`
teacher with another one."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen3Config

from mrl.data.chat import load_tokenizer
from mrl.demo.model import save_toy_tokenizer
from tests.data.two_tokenizers import byte_level

MODELS = (("policy", None), ("critic", 1), ("scorer", 1), ("teacher", None), ("foreign", None))
"""Name and number of labels of each model."""
PAIRS = [a + b + c for a in "0123456789+= ab" for b in "12=a" for c in "0123456789+= ab"]
"""Texts from which the foreign tokenizer has learned its merges."""


def make_models(directory: Path) -> None:
    """Write all models. Norms are random too, so that swapped weights are noticed.

    No model has a padding token: transformers would initialize it to 0 and never train it, but engines may sample it.
    """
    for number, (name, num_labels) in enumerate(MODELS):
        if name == "foreign":
            vocab = len(load_tokenizer(str(byte_level(directory / name, 320, words=False, texts=PAIRS))))
        else:
            vocab = save_toy_tokenizer(directory / name)
        config = Qwen3Config(
            vocab_size=vocab,
            hidden_size=48 if name == "teacher" else 32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,  # the smallest size that vLLM supports on a CPU
            max_position_embeddings=64,
            tie_word_embeddings=False,
            initializer_range=0.1,
            dtype="float32",
            **({} if num_labels is None else {"num_labels": num_labels}),
        )
        torch.manual_seed(number)
        kind = AutoModelForCausalLM if num_labels is None else AutoModelForSequenceClassification
        model = kind.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter += 0.1 * torch.randn_like(parameter)
        model.save_pretrained(directory / name)
