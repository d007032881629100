"""`config.json` of published models, as far as they matter here, in the styles that the hub holds."""

from __future__ import annotations

from typing import Any

_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("max_position_embeddings", "vocab_size"),
)


def _config(model_type: str, architecture: str, sizes: tuple[int, ...], eps: float, **more: Any) -> dict[str, Any]:
    """Return a file with the keys that all of these models have, and more."""
    return {
        "architectures": [f"{architecture}ForCausalLM"],
        "hidden_act": "silu",
        "model_type": model_type,
        "rms_norm_eps": eps,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **dict(zip(_SIZES, sizes, strict=True)),
        **more,
    }


LLAMA_2_7B = _config(  # of the first kind: no rope_theta, no head_dim
    "llama",
    "Llama",
    (4096, 11008, 32, 32, 32, 4096, 32000),
    1e-5,
    pretraining_tp=1,
    rope_scaling=None,
    torch_dtype="float16",
)
LLAMA_31_70B = _config(
    "llama",
    "Llama",
    (8192, 28672, 80, 64, 8, 131072, 128256),
    1e-5,
    attention_bias=False,
    attention_dropout=0.0,
    mlp_bias=False,
    rope_scaling={
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    rope_theta=500000.0,
)
MISTRAL_7B = _config(
    "mistral", "Mistral", (4096, 14336, 32, 32, 8, 32768, 32000), 1e-5, rope_theta=10000.0, sliding_window=4096
)
QWEN25_05B = _config(
    "qwen2",
    "Qwen2",
    (896, 4864, 24, 14, 2, 32768, 151936),
    1e-6,
    attention_dropout=0.0,
    max_window_layers=24,
    rope_theta=1000000.0,
    sliding_window=32768,
    tie_word_embeddings=True,
    use_sliding_window=False,
)
_QWEN_3 = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
}
QWEN3_8B = _config(
    "qwen3",
    "Qwen3",
    (4096, 12288, 36, 32, 8, 40960, 151936),
    1e-6,
    max_window_layers=36,
    rope_theta=1000000,
    **_QWEN_3,
)
QWEN3_235B = _config(
    "qwen3_moe",
    "Qwen3Moe",
    (4096, 12288, 94, 64, 4, 40960, 151936),
    1e-6,
    decoder_sparse_step=1,
    max_window_layers=94,
    mlp_only_layers=[],
    moe_intermediate_size=1536,
    norm_topk_prob=True,
    num_experts=128,
    num_experts_per_tok=8,
    rope_theta=1000000.0,
    router_aux_loss_coef=0.001,
    **_QWEN_3,
)
MIXTRAL_8X22B = _config(
    "mixtral",
    "Mixtral",
    (6144, 16384, 56, 48, 8, 65536, 32000),
    1e-5,
    attention_dropout=0.0,
    num_experts_per_tok=2,
    num_local_experts=8,
    rope_theta=1000000,
    router_aux_loss_coef=0.001,
    sliding_window=None,
)
_GLM_45 = {
    "attention_bias": True,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "n_group": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "topk_group": 1,
}
GLM_45 = _config(
    "glm4_moe",
    "Glm4Moe",
    (5120, 12288, 92, 96, 8, 131072, 151552),
    1e-5,
    first_k_dense_replace=3,
    moe_intermediate_size=1536,
    n_routed_experts=160,
    routed_scaling_factor=2.5,
    use_qk_norm=True,
    **_GLM_45,
)
GLM_45_AIR = _config(
    "glm4_moe",
    "Glm4Moe",
    (4096, 10944, 46, 96, 8, 131072, 151552),
    1e-5,
    first_k_dense_replace=1,
    moe_intermediate_size=1408,
    n_routed_experts=128,
    routed_scaling_factor=1.0,
    use_qk_norm=False,
    **_GLM_45,
)
DEEPSEEK_V3 = _config(
    "deepseek_v3",
    "DeepseekV3",
    (7168, 18432, 61, 128, 128, 163840, 129280),
    1e-6,
    attention_bias=False,
    attention_dropout=0.0,
    first_k_dense_replace=3,
    kv_lora_rank=512,
    moe_intermediate_size=2048,
    moe_layer_freq=1,
    n_group=8,
    n_routed_experts=256,
    n_shared_experts=1,
    norm_topk_prob=True,
    num_experts_per_tok=8,
    num_nextn_predict_layers=1,
    q_lora_rank=1536,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    rope_scaling={
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    rope_theta=10000,
    routed_scaling_factor=2.5,
    scoring_func="sigmoid",
    topk_group=4,
    topk_method="noaux_tc",
    v_head_dim=128,
)
MOONLIGHT = {
    **DEEPSEEK_V3,
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 8192,
    "vocab_size": 163840,
    "rms_norm_eps": 1e-5,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": None,
    "rope_scaling": None,
    "rope_theta": 50000,
    "routed_scaling_factor": 2.446,
    "topk_group": 1,
}
GPT_OSS_20B = _config(
    "gpt_oss",
    "GptOss",
    (2880, 2880, 24, 64, 8, 131072, 201088),
    1e-5,
    attention_bias=True,
    attention_dropout=0.0,
    experts_per_token=4,
    head_dim=64,
    initial_context_length=4096,
    layer_types=["sliding_attention", "full_attention"] * 12,
    num_experts_per_tok=4,
    num_local_experts=32,
    quantization_config={
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        "quant_method": "mxfp4",
    },
    rope_scaling={
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    rope_theta=150000,
    router_aux_loss_coef=0.9,
    sliding_window=128,
    swiglu_limit=7.0,
)
GPT_OSS_120B = {
    **GPT_OSS_20B,
    "num_hidden_layers": 36,
    "num_local_experts": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
}
