"""Sizes of published models from their `config.json`, so that a plan needs no download.

The entries contain only what planning reads, and go through the same reader as a real file. A `config.json` in a
directory or in the hub's cache takes precedence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mrl.errors import ModelError, did_you_mean
from mrl.hub import local_files
from mrl.models.families import read_spec, spec_of
from mrl.models.hf_config import HfConfig
from mrl.models.open_model import open_spec
from mrl.models.spec import ModelSpec
from mrl.plan.open_tensors import OPEN_FAMILIES, tensors_of

_ORDER = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads"),
    *("intermediate_size", "vocab_size", "tie_word_embeddings"),
)
_NOAUX = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
_LATENT: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_YARN = {"type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}
_DELTA: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e7,
    "partial_rotary_factor": 0.25,
    "max_position_embeddings": 262144,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "max_position_embeddings": 131072},
    "mistral": {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 32768, "sliding_window": None},
    "qwen2": {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 32768},
    "qwen3": {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40960, "head_dim": 128},
    "qwen3_moe": {
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 40960,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.001,
    },
    "glm4_moe": {
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "max_position_embeddings": 131072,
        "head_dim": 128,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "num_nextn_predict_layers": 1,
    },
    "deepseek_v3": _LATENT | {"q_lora_rank": 1536, "v_head_dim": 128, "num_experts_per_tok": 8, **_NOAUX},
    "kimi_k2": _LATENT | {"q_lora_rank": 1536, "v_head_dim": 128, "num_experts_per_tok": 8, **_NOAUX},
    "glm4_moe_lite": _LATENT | {"q_lora_rank": 768, "v_head_dim": 256, "num_experts_per_tok": 4},
    "gpt_oss": {
        "rms_norm_eps": 1e-5,
        "rope_theta": 1.5e5,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "max_position_embeddings": 131072,
        "head_dim": 64,
        "attention_bias": True,
        "sliding_window": 128,
        "num_experts_per_tok": 4,
    },
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA | {"num_experts": 256, "num_experts_per_tok": 8},
    "qwen3_next": _DELTA | {"num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True},
    "olmo3": {
        "architectures": ["Olmo3ForCausalLM"],
        "rms_norm_eps": 1e-6,
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 8192,
        },
        "max_position_embeddings": 65536,
        "attention_bias": False,
        "sliding_window": 4096,
    },
    "mixtral": {
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "max_position_embeddings": 32768,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.02,
    },
}
_SIZES: dict[str, tuple[str, tuple[int, ...]]] = {
    "Qwen2.5-0.5B": ("qwen2", (24, 896, 14, 2, 4864, 151936, True)),
    "Qwen2.5-1.5B": ("qwen2", (28, 1536, 12, 2, 8960, 151936, True)),
    "Qwen2.5-3B": ("qwen2", (36, 2048, 16, 2, 11008, 151936, True)),
    "Qwen2.5-7B": ("qwen2", (28, 3584, 28, 4, 18944, 152064, False)),
    "Qwen2.5-14B": ("qwen2", (48, 5120, 40, 8, 13824, 152064, False)),
    "Qwen2.5-32B": ("qwen2", (64, 5120, 40, 8, 27648, 152064, False)),
    "Qwen2.5-72B": ("qwen2", (80, 8192, 64, 8, 29568, 152064, False)),
    "DeepSeek-R1-Distill-Qwen-1.5B": ("qwen2", (28, 1536, 12, 2, 8960, 151936, False)),
    "Llama-3.1-8B": ("llama", (32, 4096, 32, 8, 14336, 128256, False)),
    "Llama-3.1-70B": ("llama", (80, 8192, 64, 8, 28672, 128256, False)),
    "Llama-3.1-405B": ("llama", (126, 16384, 128, 8, 53248, 128256, False)),
    "Llama-3.2-1B": ("llama", (16, 2048, 32, 8, 8192, 128256, True)),
    "Llama-3.2-3B": ("llama", (28, 3072, 24, 8, 8192, 128256, True)),
    "Llama-2-7b": ("llama", (32, 4096, 32, 32, 11008, 32000, False)),
    "Llama-2-13b": ("llama", (40, 5120, 40, 40, 13824, 32000, False)),
    "Llama-2-70b": ("llama", (80, 8192, 64, 8, 28672, 32000, False)),
    "SmolLM2-135M": ("llama", (30, 576, 9, 3, 1536, 49152, True)),
    "SmolLM2-360M": ("llama", (32, 960, 15, 5, 2560, 49152, True)),
    "SmolLM2-1.7B": ("llama", (24, 2048, 32, 32, 8192, 49152, True)),
    "Mistral-7B-v0.3": ("mistral", (32, 4096, 32, 8, 14336, 32768, False)),
    "Mistral-7B-Instruct-v0.3": ("mistral", (32, 4096, 32, 8, 14336, 32768, False)),
    "Qwen3-0.6B": ("qwen3", (28, 1024, 16, 8, 3072, 151936, True)),
    "Qwen3-1.7B": ("qwen3", (28, 2048, 16, 8, 6144, 151936, True)),
    "Qwen3-4B": ("qwen3", (36, 2560, 32, 8, 9728, 151936, True)),
    "Qwen3-8B": ("qwen3", (36, 4096, 32, 8, 12288, 151936, False)),
    "Qwen3-14B": ("qwen3", (40, 5120, 40, 8, 17408, 151936, False)),
    "Qwen3-32B": ("qwen3", (64, 5120, 64, 8, 25600, 151936, False)),
    "Qwen3-30B-A3B": ("qwen3_moe", (48, 2048, 32, 4, 6144, 151936, False)),
    "Qwen3-235B-A22B": ("qwen3_moe", (94, 4096, 64, 4, 12288, 151936, False)),
    "GLM-4.5": ("glm4_moe", (92, 5120, 96, 8, 12288, 151552, False)),
    "GLM-4.5-Air": ("glm4_moe", (46, 4096, 96, 8, 10944, 151552, False)),
    "GLM-4.6": ("glm4_moe", (92, 5120, 96, 8, 12288, 151552, False)),
    "GLM-4.7": ("glm4_moe", (92, 5120, 96, 8, 12288, 151552, False)),
    "DeepSeek-V3": ("deepseek_v3", (61, 7168, 128, 128, 18432, 129280, False)),
    "Kimi-K2": ("kimi_k2", (61, 7168, 64, 64, 18432, 163840, False)),
    "Moonlight-16B-A3B": ("deepseek_v3", (27, 2048, 16, 16, 11264, 163840, False)),
    "GLM-4.7-Flash": ("glm4_moe_lite", (47, 2048, 20, 20, 10240, 154880, False)),
    "gpt-oss-20b": ("gpt_oss", (24, 2880, 64, 8, 2880, 201088, False)),
    "gpt-oss-120b": ("gpt_oss", (36, 2880, 64, 8, 2880, 201088, False)),
    "Qwen3.5-4B": ("qwen3_5_text", (32, 2560, 16, 4, 9216, 248320, True)),
    "Qwen3.5-9B": ("qwen3_5_text", (32, 4096, 16, 4, 12288, 248320, False)),
    "Qwen3.5-27B": ("qwen3_5_text", (64, 5120, 24, 4, 17408, 248320, False)),
    "Qwen3.5-35B-A3B": ("qwen3_5_moe_text", (40, 2048, 16, 2, 512, 248320, False)),
    "Qwen3.5-122B-A10B": ("qwen3_5_moe_text", (48, 3072, 32, 2, 1024, 248320, False)),
    "Qwen3.5-397B-A17B": ("qwen3_5_moe_text", (60, 4096, 32, 2, 1024, 248320, False)),
    "Qwen3-Next-80B-A3B": ("qwen3_next", (48, 2048, 16, 2, 5120, 151936, False)),
    "Olmo-3-7B": ("olmo3", (32, 4096, 32, 32, 11008, 100278, False)),
    "Olmo-3-32B": ("olmo3", (64, 5120, 40, 8, 27648, 100278, False)),
    "Mixtral-8x7B": ("mixtral", (32, 4096, 32, 8, 14336, 32000, False)),
    "Mixtral-8x22B": ("mixtral", (56, 6144, 48, 8, 16384, 32768, False)),
}
_SAME_SIZES = {
    "Meta-Llama-": "Llama-",
    "Llama-3-": "Llama-3.1-",
    "Llama-3.3-": "Llama-3.1-",
    "DeepSeek-R1-Distill-Llama-": "Llama-3.1-",
    "Olmo-3-1025-": "Olmo-3-",
    "Olmo-3-1125-": "Olmo-3-",
    "Olmo-3.1-": "Olmo-3-",
    "Qwen3.6-": "Qwen3.5-",
    "Qwen2-": "Qwen2.5-",
    "Qwen2.5-Coder-": "Qwen2.5-",
    "Qwen2.5-Math-": "Qwen2.5-",
    "DeepSeek-R1-Distill-Qwen-": "Qwen2.5-",
    "DeepSeek-R1-0528-Qwen3-": "Qwen3-",
    "DeepSeek-V3.1": "DeepSeek-V3",
    "DeepSeek-R1": "DeepSeek-V3",
}
"""Prefix of a model name -> prefix of another model with the same sizes."""
_GLM_45 = {
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "first_k_dense_replace": 3,
    "use_qk_norm": True,
    "routed_scaling_factor": 2.5,
}
_WINDOWS = ["sliding_attention"] * 3 + ["full_attention"]
_GATED_1024 = {
    "linear_num_value_heads": 64,
    "moe_intermediate_size": 1024,
    "shared_expert_intermediate_size": 1024,
}
_EXPERTS: dict[str, dict[str, Any]] = {
    "Qwen3-30B-A3B": {"moe_intermediate_size": 768},
    "Qwen3-235B-A22B": {"moe_intermediate_size": 1536},
    "GLM-4.5": _GLM_45,
    "GLM-4.5-Air": {
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "first_k_dense_replace": 1,
        "use_qk_norm": False,
        "routed_scaling_factor": 1.0,
    },
    "GLM-4.6": _GLM_45 | {"max_position_embeddings": 202752},
    "GLM-4.7": _GLM_45 | {"max_position_embeddings": 202752},
    "DeepSeek-V3": {
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 1,
        "max_position_embeddings": 163840,
        "rope_theta": 1e4,
        "rope_scaling": _YARN | {"factor": 40, "beta_fast": 32, "beta_slow": 1},
    },
    "Kimi-K2": {
        "moe_intermediate_size": 2048,
        "n_routed_experts": 384,
        "routed_scaling_factor": 2.827,
        "max_position_embeddings": 131072,
        "rope_theta": 5e4,
        "rope_scaling": _YARN | {"factor": 32, "beta_fast": 1, "beta_slow": 1},
    },
    "Moonlight-16B-A3B": {
        "rms_norm_eps": 1e-5,
        "q_lora_rank": None,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "routed_scaling_factor": 2.446,
        "max_position_embeddings": 8192,
        "rope_theta": 5e4,
    },
    "Qwen3.5-27B": {"linear_num_value_heads": 48},
    "Qwen3.5-35B-A3B": {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
    "Qwen3.5-122B-A10B": _GATED_1024,
    "Qwen3.5-397B-A17B": _GATED_1024 | {"num_experts": 512, "num_experts_per_tok": 10},
    "Qwen3-Next-80B-A3B": {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
    "GLM-4.7-Flash": {
        "rms_norm_eps": 1e-5,
        "qk_nope_head_dim": 192,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 64,
        "routed_scaling_factor": 1.8,
        "num_nextn_predict_layers": 1,
        "max_position_embeddings": 202752,
        "rope_theta": 1e6,
    },
    "Olmo-3-7B": {"layer_types": _WINDOWS * 8},
    "Olmo-3-32B": {"layer_types": _WINDOWS * 16},
    "gpt-oss-20b": {"num_local_experts": 32},
    "gpt-oss-120b": {"num_local_experts": 128},
}
"""Keys in which models of one family differ."""
_VARIANT = re.compile(r"(-(instruct|base|chat|think|thinking|sft|dpo|hf|v?\d[\d.]*))*", re.IGNORECASE)


def model_spec(model: str) -> ModelSpec:
    """Return the sizes of a model: from a directory or the hub's cache, or else of a published model with that name."""
    path = local_files(model)
    if path is not None and (path / "config.json").is_file():
        return read_spec(path)
    config = _config_of(model)
    if (kind := config.text("model_type")) in OPEN_FAMILIES:
        return open_spec(config, tensors_of(kind, config), config.where)
    return spec_of(config)


def model_values(model: str) -> Mapping[str, Any]:
    """Return the contents of a model's `config.json`, of one with vision the part about the language model; for a
    published model, what is known here."""
    config = _config_of(model).of_language_model()
    return {**config.values, **dict.fromkeys(config.nulls)}


def _config_of(model: str) -> HfConfig:
    path = local_files(model)
    if path is not None and (path / "config.json").is_file():
        return HfConfig.read(path)
    name = model.partition("@")[0].rpartition("/")[2]
    if (known := _known(name)) is not None:
        return HfConfig(known_config(known), known)
    raise ModelError(
        f'"{model}" is not a directory with a config.json, and not a published model with known sizes',
        fix=f"--model DIRECTORY, with the model's config.json; or --model NAME ({did_you_mean(name, _SIZES)})",
    )


def _known(name: str) -> str | None:
    """Return the entry with the same sizes as the named model, or None."""
    for known in _SIZES:
        if name.lower().startswith(known.lower()) and _VARIANT.fullmatch(name[len(known) :]):
            return known
    for begins, other in _SAME_SIZES.items():
        if name.lower().startswith(begins.lower()):
            return _known(other + name[len(begins) :])
    return None


def known_models() -> dict[str, str]:
    """Return the published models whose sizes are known here, each with its family."""
    return {name: family for name, (family, _) in _SIZES.items()}


def known_config(name: str) -> dict[str, Any]:
    """Return the parts of the model's `config.json` that planning reads."""
    family, sizes = _SIZES[name]
    return {
        "model_type": family,
        "hidden_act": "silu",
        **_FAMILIES[family],
        **dict(zip(_ORDER, sizes, strict=True)),
        **_EXPERTS.get(name, {}),
    }
