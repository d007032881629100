"""Qwen3: Llama's decoder with a norm over each head of queries and keys, and a head dimension of its own."""

from __future__ import annotations

from mrl.models.decoder import Family, read_decoder
from mrl.models.hf_config import HfConfig
from mrl.models.qwen2 import uniform_window
from mrl.models.spec import ModelSpec


def read(config: HfConfig) -> ModelSpec:
    """Return a Qwen3's sizes; a missing head dimension means 128 here."""
    config.require("attention_bias", False, "it puts a bias on the output projection, which Megatron has not")
    config = config.defaulting(head_dim=128, rope_theta=10_000.0)
    return read_decoder(config, family="qwen3", qk_norm=True, sliding_window=uniform_window(config))


QWEN3 = Family("qwen3", "Qwen3", read)
