"""Names and shapes of the tensors of published models without a table, whose files would have them in their headers.

A test compares them with the models of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mrl.models.hf_config import HfConfig
from mrl.models.regions import Shape


def tensors_of(family: str, config: HfConfig) -> dict[str, Shape]:
    """Return the tensors of a model of one of `OPEN_FAMILIES`."""
    return OPEN_FAMILIES[family](config)


def _olmo3(config: HfConfig) -> dict[str, Shape]:
    """OLMo 3: norms of all queries and of all keys, and norms of outputs instead of inputs."""
    hidden, ffn, vocab = (config.integer(f"{name}_size") for name in ("hidden", "intermediate", "vocab"))
    heads = config.integer("num_attention_heads")
    kv = config.integer("num_key_value_heads") * (hidden // heads)
    layer: dict[str, Shape] = {
        "self_attn.q_proj.weight": (hidden, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, hidden),
        "self_attn.q_norm.weight": (hidden,),
        "self_attn.k_norm.weight": (kv,),
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
        "post_attention_layernorm.weight": (hidden,),
        "post_feedforward_layernorm.weight": (hidden,),
    }
    tensors: dict[str, Shape] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for number in range(config.integer("num_hidden_layers")):
        tensors |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    return tensors


OPEN_FAMILIES: Mapping[str, Callable[[HfConfig], dict[str, Shape]]] = {"olmo3": _olmo3}
"""`model_type` -> the tensors of a model with this `config.json`."""
