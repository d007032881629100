"""Mixtral: Mistral's attention, and in every layer experts of which each token takes the best few."""

from __future__ import annotations

from mrl.models.decoder import ExpertNames, Family, read_decoder
from mrl.models.hf_config import HfConfig
from mrl.models.spec import ModelSpec, MoeSpec

NAMES = ExpertNames(
    router="block_sparse_moe.gate.weight",
    gate="block_sparse_moe.experts.{}.w1.weight",
    up="block_sparse_moe.experts.{}.w3.weight",
    down="block_sparse_moe.experts.{}.w2.weight",
)


def read(config: HfConfig) -> ModelSpec:
    """Return a Mixtral's sizes; the weights of the chosen experts always sum to one."""
    config.require("router_jitter_noise", 0.0, "log-probs would not repeat")
    moe = MoeSpec(
        num_experts=config.integer("num_local_experts", "num_experts"),
        experts_per_token=config.integer("num_experts_per_tok"),
        expert_ffn=config.integer("intermediate_size"),
        norm_topk=True,
        aux_loss_coef=config.number("router_aux_loss_coef"),
    )
    window = config.integer("sliding_window") if "sliding_window" in config else None
    return read_decoder(config.defaulting(rope_theta=1e6), family="mixtral", sliding_window=window, moe=moe)


MIXTRAL = Family("mixtral", "Mixtral", read, NAMES)
