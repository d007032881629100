"""Tiny models for vLLM's attention on CPUs, which does not support head size 16."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tests.models.tiny_models import CORRECTION_BIAS, LARGE, tiny_config

VOCAB = 131


def make_small(family: str, directory: Path, seed: int, tied: bool = False) -> Path:
    """Save a random float32 model with head size 32. Norms and all biases are random, too."""
    torch.manual_seed(seed)
    config = tiny_config(family)
    config.tie_word_embeddings = tied
    if family == "qwen2":  # its heads always divide the hidden size
        config.num_attention_heads = config.hidden_size // 32
        config.num_key_value_heads = min(config.num_key_value_heads, config.num_attention_heads)
    elif not hasattr(config, "kv_lora_rank"):
        config.head_dim = 32
    if hasattr(config, "linear_key_head_dim"):  # the only size that vLLM's kernels for CPUs take
        config.linear_key_head_dim = config.linear_value_head_dim = 128
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn_like(parameter)
            if name.endswith(LARGE):
                parameter += 3 * torch.randn_like(parameter)
        for name, buffer in model.named_buffers():
            if name.endswith(CORRECTION_BIAS):
                buffer += 7 + 0.05 * torch.randn_like(buffer)
    model.save_pretrained(directory)
    return directory
