"""A small model with the structure of a large one: same family and same divisions, in a few thousand numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mrl.config.schema import ParallelConfig
from mrl.models.hf_config import HfConfig

_VOCAB = 131  # a prime, so that the padding of the vocabulary is tested too
_HEAD = 16
_POSITIONS = 512


def small_config(values: Mapping[str, Any], parallel: ParallelConfig) -> dict[str, Any]:
    """Return the `config.json` of a small model that a layout divides like the model with these values.

    Query groups stay groups. If there are fewer key-value heads than tensor-parallel ranks, this stays so.
    """
    large = HfConfig(values, "config.json").defaulting(num_key_value_heads=values.get("num_attention_heads"))
    num_heads, num_groups = large.integer("num_attention_heads"), large.integer("num_key_value_heads")
    groups = min(num_groups, parallel.tp)
    heads = math.lcm(groups * min(2, num_heads // num_groups), parallel.tp)
    if "kv_lora_rank" in large:
        heads = 2 * parallel.tp  # each has keys and values
    small = {
        **values,
        "vocab_size": _VOCAB,
        "hidden_size": heads * _HEAD,
        "intermediate_size": 24 * parallel.tp,
        "num_hidden_layers": _num_layers(parallel),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "max_position_embeddings": _POSITIONS,
        "initializer_range": 0.1,  # otherwise all values are so similar that a mix-up is hard to detect
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if "head_dim" in values and "kv_lora_rank" not in values:
        small["head_dim"] = 2 * _HEAD  # not hidden/heads
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if name in values:
            small |= {name: 2 * parallel.ep, "num_experts_per_tok": 2}
    if "moe_intermediate_size" in values:
        small["moe_intermediate_size"] = 16 * parallel.etp
    if "mlp_only_layers" in values:
        small["mlp_only_layers"] = []
    if "n_shared_experts" in values:
        small["moe_intermediate_size"] = 16 * math.lcm(parallel.tp, parallel.etp)  # tp splits the shared expert
    if "first_k_dense_replace" in values:
        small["first_k_dense_replace"] = 1  # layers of both kinds
    if "layer_types" in values:  # every kind of layer, in their order
        kinds = list(dict.fromkeys(values["layer_types"]))
        small["layer_types"] = [kinds[layer % len(kinds)] for layer in range(int(small["num_hidden_layers"]))]
    if values.get("sliding_window"):
        small["sliding_window"] = 8  # rows are longer
    if "kv_lora_rank" in values:
        small |= _latent(values, heads)
    if (values.get("n_group") or 1) > 1:
        small |= {"n_routed_experts": 4 * parallel.ep, "n_group": 2, "topk_group": 1}  # topk is twice as many
    if "mlp_layer_types" in values:
        small["mlp_layer_types"] = ["dense"] + ["sparse"] * (int(small["num_hidden_layers"]) - 1)
    if "linear_num_key_heads" in values:
        small |= _delta(large, int(small["num_hidden_layers"]), parallel)
    if "num_local_experts" in values:
        small["intermediate_size"] = 24 * math.lcm(parallel.tp, parallel.etp)
    if values.get("model_type") == "gpt_oss":
        small |= _gpt_oss(parallel)
    small.pop("quantization_config", None)
    return small


def _gpt_oss(parallel: ParallelConfig) -> dict[str, Any]:
    """Return sizes with a window that rows exceed, and experts that vLLM's kernels for CPUs take."""
    layers = _num_layers(parallel)
    return {
        "hidden_size": 64 * parallel.tp,
        "intermediate_size": 64 * parallel.tp,
        "num_attention_heads": 4 * parallel.tp,
        "num_key_value_heads": 2 * parallel.tp,
        "layer_types": [("sliding_attention", "full_attention")[layer % 2] for layer in range(layers)],
    }


def _delta(large: HfConfig, num_layers: int, parallel: ParallelConfig) -> dict[str, Any]:
    """Return the sizes of linear attention, in every other layer."""
    shared = min(2, large.integer("linear_num_value_heads") // large.integer("linear_num_key_heads"))
    small: dict[str, Any] = {
        "rms_norm_eps": 1e-3,  # with the usual 1e-6, norms of small outputs amplify rounding in gradients 1000 times
        "linear_num_key_heads": parallel.tp,
        "linear_num_value_heads": shared * parallel.tp,
        "linear_key_head_dim": _HEAD,
        "linear_value_head_dim": _HEAD,
        "layer_types": [("linear_attention", "full_attention")[layer % 2] for layer in range(num_layers)],
    }
    if "shared_expert_intermediate_size" in large:
        small["shared_expert_intermediate_size"] = 16 * parallel.tp
    return small


def _num_layers(parallel: ParallelConfig) -> int:
    """Return two layers or one per chunk, and the given numbers in the first and the last stage."""
    ends = [size for size in (parallel.first_stage_layers, parallel.last_stage_layers) if size]
    chunks = (parallel.pp - len(ends)) * parallel.vpp
    return sum(ends) + chunks * (1 if ends else max(1, 2 // chunks))


def _latent(values: Mapping[str, Any], heads: int) -> dict[str, Any]:
    """Return the sizes of multi-latent attention. vLLM's kernel for CPUs takes latents of only one size."""
    large = HfConfig(values, "config.json")
    is_narrow = large.integer("v_head_dim") < large.integer("qk_nope_head_dim") + large.integer("qk_rope_head_dim")
    small = {"num_key_value_heads": heads, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": _HEAD}
    small["v_head_dim"] = _HEAD if is_narrow else _HEAD + 64
    if "q_lora_rank" in large:
        small["q_lora_rank"] = 3 * _HEAD
    return small
