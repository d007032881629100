"""Llama 2 and 3.x: the plain decoder, with the rotary scaling of 3.1 and tied embeddings in the small ones."""

from __future__ import annotations

from mrl.models.decoder import Family, read_decoder
from mrl.models.hf_config import HfConfig
from mrl.models.spec import ModelSpec


def read(config: HfConfig) -> ModelSpec:
    """Return a Llama's sizes; the first files leave out the number of key heads and the rotary base."""
    config.require("attention_bias", False, "it puts a bias on the output projection, which Megatron has not")
    config.require("mlp_bias", False, "it would be a bias on Megatron's every linear layer")
    config = config.defaulting(num_key_value_heads=config.integer("num_attention_heads"), rope_theta=10_000.0)
    return read_decoder(config, family="llama")


LLAMA = Family("llama", "Llama", read)
