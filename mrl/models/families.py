"""The supported model families, and the reader of a model directory.

A family is a function from `config.json` to a spec, and an entry in `FAMILIES`.
"""

from __future__ import annotations

from pathlib import Path

from mrl.errors import ModelError, did_you_mean
from mrl.models.decoder import ExpertNames, Family, read_decoder
from mrl.models.fp8_blocks import read_block
from mrl.models.gpt_oss import GPT_OSS
from mrl.models.hf_config import HfConfig
from mrl.models.open_model import open_family, read_open_spec
from mrl.models.spec import GdnSpec, MlaSpec, ModelSpec, MoeSpec


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
    config = config.defaulting(
        partial_rotary_factor=0.5, use_qk_norm=False, routed_scaling_factor=1.0, n_shared_experts=1, rope_theta=10_000.0
    )
    return read_decoder(
        config,
        partial_rotary=True,
        family="glm4_moe",
        qkv_bias=config.flag("attention_bias"),
        qk_norm=config.flag("use_qk_norm"),
        moe=_read_sigmoid_experts(config, dense_layers=1),
        num_predicting_layers=_num_predicting_layers(config),
    )


def _read_sigmoid_experts(config: HfConfig, *, dense_layers: int | None = None) -> MoeSpec:
    """Read experts that sigmoid scores and a frozen bias choose, with a shared expert, after some layers without any.

    A file may leave out the number of these layers only if the family has a default.
    """
    config.require("norm_topk_prob", True, "Megatron always normalizes sigmoid scores")
    config = config.defaulting(n_group=1, topk_group=1, first_k_dense_replace=dense_layers)
    groups, groups_per_token = config.integer("n_group"), config.integer("topk_group")
    per_token, expert_ffn = config.integer("num_experts_per_tok"), config.integer("moe_intermediate_size")
    if groups > 1 and per_token != 2 * groups_per_token:
        # Megatron ranks a group by its best experts_per_token / groups_per_token scores, the engine by its best two.
        what = f"{groups_per_token} of {groups} groups for {per_token} experts per token"
        raise config.error("topk_group", f"{what} is not supported, only {per_token / 2:g}", "use another model")
    # Not `integer`, because 0 is allowed: experts in every layer.
    first = int(config.number("first_k_dense_replace"))
    return MoeSpec(
        num_experts=config.integer("n_routed_experts", "num_local_experts"),
        experts_per_token=per_token,
        expert_ffn=expert_ffn,
        norm_topk=True,
        aux_loss_coef=0.0,
        dense_layers=frozenset(range(min(first, config.integer("num_hidden_layers")))),
        scoring="sigmoid",
        correction_bias=True,
        scaling=config.number("routed_scaling_factor"),
        shared_ffn=config.integer("n_shared_experts") * expert_ffn,
        num_groups=groups,
        groups_per_token=groups_per_token if groups > 1 else 1,
    )


def _num_predicting_layers(config: HfConfig) -> int:
    return int(config.defaulting(num_nextn_predict_layers=0).number("num_nextn_predict_layers"))


def _read_deepseek_v3(config: HfConfig) -> ModelSpec:
    """Read DeepSeek-V3, V3.1 and R1, Moonlight and Kimi-K2: multi-latent attention, and GLM-4.5's experts.

    Kimi-K2 calls its files `kimi_k2`, but they are like the others.
    """
    because = "vLLM would choose experts in another way"
    for name, only in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if name not in config:
            raise config.error(name, f"is missing: {because}", f'add "{name}": "{only}" to the file')
        config.require(name, only, because)
    config.require("moe_layer_freq", 1, "experts are in all layers after the first_k_dense_replace first")
    return _read_latent(config, _read_sigmoid_experts(config))


def _read_glm4_moe_lite(config: HfConfig) -> ModelSpec:
    """Read GLM-4.7-Flash: multi-latent attention, and GLM-4.5's experts.

    Newer files list the kind of each layer instead of the number of layers without experts.
    """
    if "mlp_layer_types" in config:
        kinds = config.items("mlp_layer_types", str)
        first = kinds.count("dense")
        if kinds != ["dense"] * first + ["sparse"] * (len(kinds) - first):
            raise config.error("mlp_layer_types", "layers without experts are supported only before the others")
        config = config.defaulting(first_k_dense_replace=first)
    config = config.defaulting(n_shared_experts=1, routed_scaling_factor=1.0)
    return _read_latent(config, _read_sigmoid_experts(config, dense_layers=1))


def _read_latent(config: HfConfig, moe: MoeSpec) -> ModelSpec:
    """Read a model with multi-latent attention, with or without a latent of queries."""
    config.require("attention_bias", False, "Megatron's multi-latent attention has no bias")
    config.require("rope_interleave", True, "Megatron and vLLM rotate neighboring dimensions")
    if "q_lora_rank" not in config and "q_lora_rank" not in config.nulls:
        fix = "add its size to the file, or null if the model has no latent of queries"
        raise config.error("q_lora_rank", "is missing: vLLM would take the size of DeepSeek-V3", fix)
    config = config.defaulting(num_key_value_heads=config.integer("num_attention_heads"))
    config.require("num_key_value_heads", config.integer("num_attention_heads"), "each head has its own keys")
    mla = MlaSpec(
        q_rank=config.integer("q_lora_rank") if "q_lora_rank" in config else None,
        kv_rank=config.integer("kv_lora_rank"),
        nope_dim=config.integer("qk_nope_head_dim"),
        rope_dim=config.integer("qk_rope_head_dim"),
        v_dim=config.integer("v_head_dim"),
    )
    return read_decoder(
        config,
        mla=mla,
        family=config.text("model_type"),
        moe=moe,
        num_predicting_layers=_num_predicting_layers(config),
    )


def _read_qwen3_5(config: HfConfig) -> ModelSpec:
    """Read Qwen3.5 and 3.6: three layers with the gated delta rule for each layer with gated attention."""
    return _read_delta(config)


def _read_qwen3_5_moe(config: HfConfig) -> ModelSpec:
    """Read the mixtures of Qwen3.5 and 3.6: the same attention, and experts in every layer, one of them for every
    token, with a gate."""
    config.require("norm_topk_prob", True, "vLLM always normalizes the weights of the chosen experts")
    return _read_delta(config, moe=_read_gated_experts(config))


def _read_qwen3_next(config: HfConfig) -> ModelSpec:
    """Read Qwen3-Next: the mixtures of Qwen3.5, with projections of linear attention stored by key head."""
    config.require("mlp_only_layers", [], "mrl has not been compared with such layers")
    config.require("decoder_sparse_step", 1, "mrl has not been compared with layers without experts")
    config.require("norm_topk_prob", True, "mrl has not been compared with other weights of experts")
    return _read_delta(config, moe=_read_gated_experts(config), interleaved=True)


def _read_gated_experts(config: HfConfig) -> MoeSpec:
    return MoeSpec(
        num_experts=config.integer("num_experts", "num_local_experts"),
        experts_per_token=config.integer("num_experts_per_tok"),
        expert_ffn=config.integer("moe_intermediate_size"),
        norm_topk=True,
        aux_loss_coef=config.defaulting(router_aux_loss_coef=0.001).number("router_aux_loss_coef"),
        shared_ffn=config.integer("shared_expert_intermediate_size"),
        shared_gate=True,
    )


def _read_delta(config: HfConfig, *, moe: MoeSpec | None = None, interleaved: bool = False) -> ModelSpec:
    """Read a model in which some layers have the gated delta rule, and the others attention with a gate."""
    config.require("attention_bias", False, "it adds a bias to the output projection, which Megatron does not support")
    config.require("output_gate_type", "silu", "mrl multiplies by silu of the gate")
    layers = range(config.integer("num_hidden_layers"))
    if "layer_types" in config:
        kinds = config.items("layer_types", str)
        if len(kinds) != len(layers) or not {"linear_attention", "full_attention"}.issuperset(kinds):
            what = f"{len(kinds)} layers of {', '.join(sorted(set(kinds)))} are not {len(layers)} of linear_attention"
            raise config.error("layer_types", f"{what} and full_attention", "use another model")
        linear = frozenset(layer for layer in layers if kinds[layer] == "linear_attention")
    else:
        interval = config.defaulting(full_attention_interval=4).integer("full_attention_interval")
        linear = frozenset(layer for layer in layers if (layer + 1) % interval)
    gdn = GdnSpec(
        key_heads=config.integer("linear_num_key_heads"),
        value_heads=config.integer("linear_num_value_heads"),
        key_dim=config.integer("linear_key_head_dim"),
        value_dim=config.integer("linear_value_head_dim"),
        kernel=config.integer("linear_conv_kernel_dim"),
        layers=linear,
        interleaved=interleaved,
    )
    if moe:
        config = config.defaulting(intermediate_size=moe.shared_ffn)  # files leave it out: no layer has such an MLP
    return read_decoder(
        config.defaulting(head_dim=256, partial_rotary_factor=0.25, rope_theta=10_000.0),
        partial_rotary=True,
        family=config.text("model_type"),
        qk_norm=True,
        moe=moe,
        gdn=gdn,
        output_gate=True,
        zero_centered_norms=True,
    )


class Families(dict[str, Family]):
    """The families with a table, by `model_type`. Another one has no table."""

    def __missing__(self, model_type: str) -> Family:
        return open_family(model_type)


_VISION_AND_MTP = ("model.visual.", "mtp.")
_GATED_NAMES = ExpertNames(shared="mlp.shared_expert.{}_proj.weight")
_FLOAT32_SCORES = {"moe_router_dtype": "float32"}  # otherwise vLLM rounds the scores of experts to the model's dtype
FAMILIES = Families(
    (family.model_type, family)
    for family in (
        Family("llama", "Llama", _read_llama),
        Family("mistral", "Mistral", _read_mistral),
        Family("mixtral", "Mixtral", _read_mixtral, _MIXTRAL_NAMES, engine_repeats_ends=True),
        Family("qwen2", "Qwen2", _read_qwen2),
        Family("qwen3", "Qwen3", _read_qwen3),
        Family("qwen3_moe", "Qwen3Moe", _read_qwen3_moe, engine_repeats_ends=True),
        Family("glm4_moe", "Glm4Moe", _read_glm4_moe, float32_router=True, has_score_head=False),
        Family("deepseek_v3", "DeepseekV3", _read_deepseek_v3, engine_overrides=_FLOAT32_SCORES),
        Family("kimi_k2", "DeepseekV3", _read_deepseek_v3, engine_overrides=_FLOAT32_SCORES),
        Family("glm4_moe_lite", "Glm4MoeLite", _read_glm4_moe_lite, float32_router=True, has_score_head=False),
        GPT_OSS,
        Family(
            "qwen3_5_text",
            "Qwen3_5",
            _read_qwen3_5,
            score_prefix="Qwen3_5Text",
            wrapper="Qwen3_5ForConditionalGeneration",
            passengers=_VISION_AND_MTP,
        ),
        Family(
            "qwen3_5_moe_text",
            "Qwen3_5Moe",
            _read_qwen3_5_moe,
            _GATED_NAMES,
            has_score_head=False,
            wrapper="Qwen3_5MoeForConditionalGeneration",
            passengers=_VISION_AND_MTP,
            may_be_stacked=True,
        ),
        Family("qwen3_next", "Qwen3Next", _read_qwen3_next, _GATED_NAMES, passengers=("mtp.",)),
    )
)


def read_spec(path: str | Path) -> ModelSpec:
    """Return the spec of a model directory: of its `config.json` or, for a family without a table, of its files."""
    config = HfConfig.read(path)
    if "model_type" in config and config.of_language_model().text("model_type") not in FAMILIES:
        return read_open_spec(Path(path), config)
    return spec_of(config)


def spec_of(config: HfConfig) -> ModelSpec:
    """Return the spec described by a `config.json`. Raise an error if mrl cannot train such a model exactly."""
    whole, config = config, config.of_language_model()
    model_type = config.text("model_type")
    if model_type not in FAMILIES:
        raise config.error("model_type", f'"{model_type}" is not supported', did_you_mean(model_type, FAMILIES))
    family = FAMILIES[model_type]
    known = {family.architecture("lm"), *([family.architecture("score")] if family.has_score_head else [])}
    if whole is not config:
        known = {family.wrapper} - {""}
    listed = whole.defaulting(architectures=[]).items("architectures", str)
    if not known.issuperset(listed):
        raise whole.error("architectures", f"{', '.join(listed)}: only {' and '.join(sorted(known))} are supported")
    read_block(whole)  # raises an error if the files are quantized in a way that cannot be read
    try:
        return family.read(config)
    except ModelError as error:
        error.where = error.where or config.where  # the spec does not know its file
        raise
