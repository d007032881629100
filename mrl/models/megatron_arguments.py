"""Megatron's arguments for a model.

torch is loaded only when they are requested, so that planning needs no torch.
"""

from __future__ import annotations

import math
from typing import Any

from mrl.config.lora import LoraConfig
from mrl.models.adapters import splits_experts
from mrl.models.rope import YarnScaling
from mrl.models.spec import ModelSpec, MoeSpec


def transformer_arguments(spec: ModelSpec) -> dict[str, Any]:
    """Return the arguments of Megatron's `TransformerConfig` that describe the model. The engine adds how it
    runs."""
    from torch.nn.functional import silu

    return {
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden,
        "num_attention_heads": spec.num_heads,
        "num_query_groups": spec.num_kv_heads,
        "kv_channels": spec.head_dim,
        "ffn_hidden_size": spec.ffn,
        "layernorm_epsilon": spec.norm_eps,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": silu,
        "add_bias_linear": False,
        "add_qkv_bias": spec.qkv_bias,
        "qk_layernorm": spec.qk_norm,
        # Megatron counts the tokens before the current one, transformers includes the current one.
        "window_size": (spec.sliding_window - 1, 0) if spec.sliding_window else None,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "layernorm_zero_centered_gamma": spec.zero_centered_norms,
        "attention_output_gate": spec.output_gate,
        **_mla_config(spec),
        **_gdn_config(spec),
        **_moe_config(spec),
        **_gpt_oss_config(spec),
    }


def _gpt_oss_config(spec: ModelSpec) -> dict[str, Any]:
    """Return what only gpt-oss has. One switch of Megatron adds the biases of attention, router and experts.

    The engine adds the activation.
    """
    moe = spec.moe
    if moe is None or moe.clamp is None:
        return {}
    assert spec.sinks, "the biases are those of gpt-oss, which has sinks"
    assert spec.output_bias, "Megatron's biases include that of attention's output"
    yarn = spec.rope.scaling
    factor = yarn.softmax_factor if isinstance(yarn, YarnScaling) else 1.0
    return {
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": moe.clamp,
        "add_bias_linear": True,
        "softmax_type": "learnable",
        "softmax_scale": factor / math.sqrt(spec.head_dim),
        "window_attn_skip_freq": [int(layer not in spec.layers_without_window) for layer in range(spec.num_layers)],
    }


def _gdn_config(spec: ModelSpec) -> dict[str, Any]:
    gdn = spec.gdn
    if gdn is None:
        return {}
    return {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [int(spec.is_linear(layer)) for layer in range(spec.num_layers)],
        "linear_conv_kernel_dim": gdn.kernel,
        "linear_key_head_dim": gdn.key_dim,
        "linear_value_head_dim": gdn.value_dim,
        "linear_num_key_heads": gdn.key_heads,
        "linear_num_value_heads": gdn.value_heads,
    }


def _mla_config(spec: ModelSpec) -> dict[str, Any]:
    mla = spec.mla
    if mla is None:
        return {}
    yarn = spec.rope.scaling if isinstance(spec.rope.scaling, YarnScaling) else None
    return {
        "multi_latent_attention": True,
        "q_lora_rank": mla.q_rank,
        "kv_lora_rank": mla.kv_rank,
        "qk_head_dim": mla.nope_dim,
        "qk_pos_emb_head_dim": mla.rope_dim,
        "v_head_dim": mla.v_dim,
        "qk_layernorm": True,
        # The code that builds the model sets the frequencies. Megatron takes only the softmax's scale from these.
        "rope_type": "rope",
        "rotary_base": spec.rope.theta,
        "rotary_scaling_factor": yarn.factor if yarn else 1.0,
        "mscale_all_dim": yarn.mscale if yarn else 0.0,
        "apply_rope_fusion": False,  # the fused kernel does not take frequencies
    }


def _moe_config(spec: ModelSpec) -> dict[str, Any]:
    moe = spec.moe
    if moe is None:
        return {}
    return _router_with_bias(moe) | {
        "num_moe_experts": moe.num_experts,
        "moe_router_topk": moe.experts_per_token,
        "moe_ffn_hidden_size": moe.expert_ffn,
        "moe_layer_freq": [int(spec.has_experts(layer)) for layer in range(spec.num_layers)],
        "moe_router_score_function": moe.scoring,
        # A softmax over the chosen logits equals the normalized full softmax over them.
        "moe_router_pre_softmax": not moe.norm_topk,
        "moe_router_topk_scaling_factor": moe.scaling if moe.scaling != 1 else None,
        "moe_router_num_groups": moe.num_groups if moe.num_groups > 1 else None,
        "moe_router_group_topk": moe.groups_per_token if moe.num_groups > 1 else None,
        "moe_router_dtype": "fp32",
        "moe_shared_expert_intermediate_size": moe.shared_ffn or None,
        "moe_shared_expert_gate": moe.shared_gate,
        # The loss is only the algorithm's. `aux_loss_coef` is available for a balancing term.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }


def fused_kernels(spec: ModelSpec, lora: LoraConfig | None = None) -> dict[str, bool]:
    """Return the arguments of `TransformerConfig` that fuse kernels, including all experts of a layer.

    Transformer Engine has these kernels on GPUs. Engines and plans use them unless the user sets something else.
    Experts of a frozen model in FP8 are multiplied one by one. Experts with adapters are too, unless the user sets
    `moe_grouped_gemm`.
    """
    names = ["bias_activation_fusion", "gradient_accumulation_fusion"]
    if spec.mla is None:
        names.append("apply_rope_fusion")
    if spec.moe is not None:
        one_by_one = lora is not None and splits_experts(spec, lora)
        names += ["moe_permute_fusion", *([] if one_by_one else ["moe_grouped_gemm"])]
    return dict.fromkeys(names, True)


def gpt_model_arguments(spec: ModelSpec) -> dict[str, Any]:
    """Return the arguments of Megatron's `GPTModel` that describe the model. The layout pads the vocabulary.

    Megatron's own scaling for Llama 3 fixes three of its four numbers, so it stays off. The code that builds the
    model sets the rotary module's `inv_freq` to `rope.inverse_frequencies()`.
    """
    return {
        "position_embedding_type": "rope",
        "rotary_base": spec.rope.theta,
        "rotary_percent": 1.0 if spec.mla else spec.rope.dim / spec.head_dim,
        "rope_scaling": False,
        "share_embeddings_and_output_weights": spec.tied,
        "max_sequence_length": spec.max_positions,
    }


def _router_with_bias(moe: MoeSpec) -> dict[str, Any]:
    """Return Megatron's arguments of a correction bias. Megatron's update of the bias is off."""
    if not moe.correction_bias:
        return {}
    return {"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.0}
