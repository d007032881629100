"""A tiny random model of each family, made and saved by transformers, with the odd shapes that real ones have."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DeepseekV3Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

SIZES: dict[str, Any] = {
    "vocab_size": 131,  # no multiple of anything
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 128,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,  # with 64 for positions the only size that vLLM's kernels for CPUs take
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 24,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "moe_intermediate_size": 48,
}
"""Sizes of models with multi-latent attention."""
DELTA: dict[str, Any] = {
    "rms_norm_eps": 1e-3,  # with the usual 1e-6, norms of small outputs amplify rounding in gradients 1000 times
    "num_attention_heads": 8,
    "num_key_value_heads": 4,  # tp divides them
    "head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
}
"""Sizes of models with the gated delta rule."""
GATED_EXPERTS: dict[str, Any] = {
    **DELTA,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 32,
}
CONFIGS: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {"rope_parameters": LLAMA3_ROPE}),
    "llama_tied": (LlamaConfig, {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "mistral": (MistralConfig, {"sliding_window": 24, "num_key_value_heads": 1}),
    "qwen2": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {"head_dim": 32, "num_key_value_heads": 1}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        {
            "head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "glm4_moe": (
        Glm4MoeConfig,
        {
            "head_dim": 32,
            "attention_bias": True,
            "use_qk_norm": True,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 2,
            "moe_intermediate_size": 48,
            "routed_scaling_factor": 2.5,
        },
    ),
    "deepseek_v3": (
        DeepseekV3Config,
        {
            **LATENT,
            "rope_parameters": YARN,
            "q_lora_rank": 48,
            "v_head_dim": 16,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 4,
            "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        },
    ),
    "glm4_moe_lite": (
        Glm4MoeLiteConfig,
        {**LATENT, "q_lora_rank": None, "v_head_dim": 40, "num_experts_per_tok": 2, "rms_norm_eps": 1e-6},
    ),
    "gpt_oss": (
        GptOssConfig,
        {
            "hidden_size": 128,
            "intermediate_size": 128,  # a square projection: a transposed one would load
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150_000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "qwen3_5_text": (Qwen3_5TextConfig, DELTA),
    "qwen3_5_moe_text": (Qwen3_5MoeTextConfig, GATED_EXPERTS),
    "qwen3_next": (Qwen3NextConfig, GATED_EXPERTS),
    "mixtral": (MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
}
TINY_FAMILIES = tuple(CONFIGS)
MOE_FAMILIES = (
    *("qwen3_moe", "glm4_moe", "deepseek_v3", "glm4_moe_lite", "gpt_oss"),
    *("qwen3_5_moe_text", "qwen3_next", "mixtral"),
)
DELTA_FAMILIES = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
CORRECTION_BIAS = "e_score_correction_bias"
LARGE = (".sinks", "_proj_bias")  # of gpt-oss: so large that the limits of experts and the sinks matter


def tiny_config(family: str) -> PretrainedConfig:
    """The transformers configuration of a tiny model: one of `TINY_FAMILIES`."""
    kind, own = CONFIGS[family]
    return kind(**{**SIZES, **own})


def make_tiny(
    family: str,
    directory: Path,
    seed: int = 0,
    head: Literal["lm", "score"] = "lm",
    bias: float = 7.0,
    sizes: Mapping[str, int] | None = None,
    **save_options: Any,
) -> Path:
    """Save a random float32 model to `directory`; norms and biases are random too, so that a mix-up shows.

    Correction biases of routers lie around `bias`: if they also weighted the experts, large ones would show it.
    """
    torch.manual_seed(seed)
    config = tiny_config(family)
    for name, size in (sizes or {}).items():
        setattr(config, name, size)
    if head == "score":
        config.num_labels = 1
    kind = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification
    model = kind.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        if "linear_attn" in str(model):  # norms of norms of the zeros of a padding token have gradients of 1e7
            model.get_input_embeddings().weight.normal_(0, config.initializer_range)
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn_like(parameter)
            if name.endswith(LARGE):
                parameter += 3 * torch.randn_like(parameter)
        for name, buffer in model.named_buffers():
            if name.endswith(CORRECTION_BIAS):
                buffer += bias + 0.05 * torch.randn_like(buffer)  # more, and some experts never work
    model.save_pretrained(directory, **save_options)
    return directory
