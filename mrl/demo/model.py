"""A model of 400,000 parameters in two layers, with a tokenizer of bytes: made here, nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

import torch

from mrl.data.toy_tokenizer import save_toy_tokenizer

MAX_LENGTH = 64


def make_model(directory: Path, seed: int, num_layers: int = 2, max_length: int = MAX_LENGTH) -> Path:
    """Write a random model like Qwen3 in Hugging Face format."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    directory.mkdir(parents=True)
    vocab = save_toy_tokenizer(directory)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=max_length,
        tie_word_embeddings=False,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory
