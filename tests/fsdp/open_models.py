"""Tiny random models of families without a table in mrl, made by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = {"sliding_window": 8}
LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4, "topk_method": "greedy", "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
}  # fmt: skip
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
OWN: dict[str, dict[str, Any]] = {
    "gemma3_text": {"head_dim": 8, **WINDOW},  # windows in some layers, scaled embeddings
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "granite": {"logits_scaling": 4.0},
    "gpt2": {"n_embd": 32, "n_layer": 4, "n_head": 4},  # names without a prefix, transposed matrices
    "gpt_neox": {},
    "cohere2": WINDOW,
    "olmo3": WINDOW,
    "deepseek_v2": {**LATENT, **EXPERTS},
    "gemma4_text": {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"] * 2, **WINDOW},
    "apertus": {},  # numbers without an axis
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "exaone4": WINDOW,
}


def make_open(family: str, directory: Path, **values: Any) -> Path:
    config = AutoConfig.for_model(family, **{**SIZES, **OWN[family], **values})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(1.0 if parameter.ndim == 1 and "bias" not in name else 0.0, 0.2)
    model.save_pretrained(directory)
    return directory
