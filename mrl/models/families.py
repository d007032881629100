"""The supported model families, and the reader of a model directory.

A family is a function from `config.json` to a spec, and an entry in `FAMILIES`.
"""

from __future__ import annotations

from pathlib import Path

from mrl.errors import ModelError, did_you_mean
from mrl.models.decoder import ExpertNames, Family, read_decoder
from mrl.models.hf_config import HfConfig
from mrl.models.spec import ModelSpec, MoeSpec


def _read_llama(config: HfConfig) -> ModelSpec:
    """Read Llama 2 and 3.x: the plain decoder, with the rotary scaling of 3.1 and tied embeddings in small models.

    The first files leave out the number of key heads and the rotary base.
    """
    config.require("attention_bias", False, "it adds a bias to the output projection, which Megatron does not support")
    config.require("mlp_bias", False, "Megatron could only add a bias to every linear layer")
    config = config.defaulting(num_key_value_heads=config.integer("num_attention_heads"), rope_theta=10_000.0)
    return read_decoder(config, family="llama")


def _read_mistral(config: HfConfig) -> ModelSpec:
    """Read Mistral: Llama's decoder, in its first version with a sliding window in all layers.

    A window of null means no window.
    """
    config.require("layer_types", None, "a window in some layers would become a window in all layers")
    window = config.integer("sliding_window") if "sliding_window" in config else None
    return read_decoder(config.defaulting(rope_theta=10_000.0), family="mistral", sliding_window=window)


_MIXTRAL_NAMES = ExpertNames(
    router="block_sparse_moe.gate.weight",
    gate="block_sparse_moe.experts.{}.w1.weight",
    up="block_sparse_moe.experts.{}.w3.weight",
    down="block_sparse_moe.experts.{}.w2.weight",
)


def _read_mixtral(config: HfConfig) -> ModelSpec:
    """Read Mixtral: Mistral's attention, with experts in every layer, of which each token uses the best few.

    The weights of the chosen experts always sum to one.
    """
    config.require("router_jitter_noise", 0.0, "log-probs would not be reproducible")
    moe = MoeSpec(
        num_experts=config.integer("num_local_experts", "num_experts"),
        experts_per_token=config.integer("num_experts_per_tok"),
        expert_ffn=config.integer("intermediate_size"),
        norm_topk=True,
        aux_loss_coef=config.number("router_aux_loss_coef"),
    )
    window = config.integer("sliding_window") if "sliding_window" in config else None
    return read_decoder(config.defaulting(rope_theta=1e6), family="mixtral", sliding_window=window, moe=moe)


def _read_qwen2(config: HfConfig) -> ModelSpec:
    """Read Qwen2 and Qwen2.5: Llama's decoder with a bias on queries, keys and values."""
    window = _uniform_window(config)
    return read_decoder(config.defaulting(rope_theta=10_000.0), family="qwen2", qkv_bias=True, sliding_window=window)


def _uniform_window(config: HfConfig) -> int | None:
    """Return the window of all layers, or None. Qwen's files give a window even if it is switched off."""
    if not config.defaulting(use_sliding_window=False).flag("use_sliding_window"):
        return None
    if "layer_types" in config:
        sliding = [kind == "sliding_attention" for kind in config.items("layer_types", str)]
    else:
        # Not `integer`, because 0, a window in every layer, is allowed here.
        first = config.number("max_window_layers")
        sliding = [layer >= first for layer in range(config.integer("num_hidden_layers"))]
    if any(sliding) != all(sliding):
        raise config.error(
            "use_sliding_window",
            f"windows in {sum(sliding)} of {len(sliding)} layers are not supported, only in all layers or none",
            "switch it off if your sequences fit into sliding_window",
        )
    return config.integer("sliding_window") if any(sliding) else None


def _read_qwen3(config: HfConfig) -> ModelSpec:
    """Read Qwen3: Llama's decoder with a norm over each head of queries and keys, and a separate head dimension.

    A missing head dimension means 128 here.
    """
    config.require("attention_bias", False, "it adds a bias to the output projection, which Megatron does not support")
    config = config.defaulting(head_dim=128, rope_theta=10_000.0)
    return read_decoder(config, family="qwen3", qk_norm=True, sliding_window=_uniform_window(config))


def _read_qwen3_moe(config: HfConfig) -> ModelSpec:
    """Read Qwen3-MoE: Qwen3's attention, and experts in all layers except dense layers listed in the file."""
    config.require("attention_bias", False, "it adds a bias to the output projection, which Megatron does not support")
    config.require("use_sliding_window", False)
    config = config.defaulting(decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=False, rope_theta=10_000.0)
    step, mlp_only = config.integer("decoder_sparse_step"), config.items("mlp_only_layers", int)
    layers = range(config.integer("num_hidden_layers"))
    moe = MoeSpec(
        num_experts=config.integer("num_experts", "num_local_experts"),
        experts_per_token=config.integer("num_experts_per_tok"),
        expert_ffn=config.integer("moe_intermediate_size"),
        norm_topk=config.flag("norm_topk_prob"),
        aux_loss_coef=config.number("router_aux_loss_coef"),
        dense_layers=frozenset(layer for layer in layers if layer in mlp_only or (layer + 1) % step),
    )
    return read_decoder(config, family="qwen3_moe", qk_norm=True, moe=moe)


def _read_glm4_moe(config: HfConfig) -> ModelSpec:
    """Read GLM-4.5, 4.5-Air, 4.6 and 4.7: attention that rotates half of each head, first layers without experts, and a
    shared expert.

    A frozen bias corrects the choice of experts. Layers that predict more tokens come after the others; they are left
    out.
    """
    config.require("n_group", 1, "mrl does not limit a token's experts to groups")
    config.require("topk_group", 1, "mrl does not limit a token's experts to groups")
    config.require("norm_topk_prob", True, "Megatron always normalizes sigmoid scores")
    config = config.defaulting(
        partial_rotary_factor=0.5, use_qk_norm=False, routed_scaling_factor=1.0, n_shared_experts=1, rope_theta=10_000.0
    )
    # Not `integer`, because 0 is allowed: experts in every layer, and no predicting layers.
    first = int(config.defaulting(first_k_dense_replace=1).number("first_k_dense_replace"))
    predicting = config.defaulting(num_nextn_predict_layers=0).number("num_nextn_predict_layers")
    expert_ffn = config.integer("moe_intermediate_size")
    moe = MoeSpec(
        num_experts=config.integer("n_routed_experts", "num_local_experts"),
        experts_per_token=config.integer("num_experts_per_tok"),
        expert_ffn=expert_ffn,
        norm_topk=True,
        aux_loss_coef=0.0,
        dense_layers=frozenset(range(min(first, config.integer("num_hidden_layers")))),
        scoring="sigmoid",
        correction_bias=True,
        scaling=config.number("routed_scaling_factor"),
        shared_ffn=config.integer("n_shared_experts") * expert_ffn,
    )
    return read_decoder(
        config,
        partial_rotary=True,
        family="glm4_moe",
        qkv_bias=config.flag("attention_bias"),
        qk_norm=config.flag("use_qk_norm"),
        moe=moe,
        num_predicting_layers=int(predicting),
    )


FAMILIES = {
    family.model_type: family
    for family in (
        Family("llama", "Llama", _read_llama),
        Family("mistral", "Mistral", _read_mistral),
        Family("mixtral", "Mixtral", _read_mixtral, _MIXTRAL_NAMES),
        Family("qwen2", "Qwen2", _read_qwen2),
        Family("qwen3", "Qwen3", _read_qwen3),
        Family("qwen3_moe", "Qwen3Moe", _read_qwen3_moe),
        Family("glm4_moe", "Glm4Moe", _read_glm4_moe, float32_router=True, has_score_head=False),
    )
}


def read_spec(path: str | Path) -> ModelSpec:
    """Return the spec described by the `config.json` in a model directory."""
    return spec_of(HfConfig.read(path))


def spec_of(config: HfConfig) -> ModelSpec:
    """Return the spec described by a `config.json`. Raise an error if mrl cannot train such a model exactly."""
    model_type = config.text("model_type")
    if model_type not in FAMILIES:
        raise config.error("model_type", f'"{model_type}" is not supported', did_you_mean(model_type, FAMILIES))
    family = FAMILIES[model_type]
    known = {family.architecture("lm"), *([family.architecture("score")] if family.has_score_head else [])}
    listed = config.defaulting(architectures=[]).items("architectures", str)
    if not known.issuperset(listed):
        raise config.error("architectures", f"{', '.join(listed)}: only {' and '.join(sorted(known))} are supported")
    if "quantization_config" in config:
        raise config.error("quantization_config", "quantized weights cannot be trained", "use the full-precision model")
    try:
        return family.read(config)
    except ModelError as error:
        error.where = error.where or config.where  # the spec does not know its file
        raise
