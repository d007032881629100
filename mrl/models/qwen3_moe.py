"""Qwen3-MoE: Qwen3's attention, and experts in all layers but those that the file keeps dense."""

from __future__ import annotations

from mrl.models.decoder import Family, read_decoder
from mrl.models.hf_config import HfConfig
from mrl.models.spec import ModelSpec, MoeSpec


def read(config: HfConfig) -> ModelSpec:
    config.require("attention_bias", False, "it puts a bias on the output projection, which Megatron has not")
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


QWEN3_MOE = Family("qwen3_moe", "Qwen3Moe", read)
