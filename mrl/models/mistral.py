"""Mistral: Llama's decoder, in its first version with a sliding window over all layers."""

from __future__ import annotations

from mrl.models.decoder import Family, read_decoder
from mrl.models.hf_config import HfConfig
from mrl.models.spec import ModelSpec


def read(config: HfConfig) -> ModelSpec:
    """Return a Mistral's sizes; a window of null is none."""
    config.require("layer_types", None, "a window of some layers would become one of all")
    window = config.integer("sliding_window") if "sliding_window" in config else None
    return read_decoder(config.defaulting(rope_theta=10_000.0), family="mistral", sliding_window=window)


MISTRAL = Family("mistral", "Mistral", read)
