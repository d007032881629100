"""Qwen2 and Qwen2.5: Llama's decoder with a bias on queries, keys and values."""

from __future__ import annotations

from mrl.models.decoder import Family, read_decoder
from mrl.models.hf_config import HfConfig
from mrl.models.spec import ModelSpec


def read(config: HfConfig) -> ModelSpec:
    window = uniform_window(config)
    return read_decoder(config.defaulting(rope_theta=10_000.0), family="qwen2", qkv_bias=True, sliding_window=window)


def uniform_window(config: HfConfig) -> int | None:
    """Return the window of all layers, or None: Qwen's files name one also where it is switched off."""
    if not config.defaulting(use_sliding_window=False).flag("use_sliding_window"):
        return None
    if "layer_types" in config:
        sliding = [kind == "sliding_attention" for kind in config.items("layer_types", str)]
    else:
        # No `integer`: 0, a window in every layer, is allowed here.
        first = config.number("max_window_layers")
        sliding = [layer >= first for layer in range(config.integer("num_hidden_layers"))]
    if any(sliding) != all(sliding):
        raise config.error(
            "use_sliding_window",
            f"windows in {sum(sliding)} of {len(sliding)} layers are not supported, only in all or none",
            "switch it off if your sequences fit into sliding_window",
        )
    return config.integer("sliding_window") if any(sliding) else None


QWEN2 = Family("qwen2", "Qwen2", read)
