"""Engines whose linear layers are in FP8 (`rollout.vllm.quantization`).

The trainer's ranks quantize rows and blocks before they send them. vLLM quantizes everything else when it arrives.

Routers and other gates stay in the dtype of the engine: in FP8, a router chooses other experts for many tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mrl.config.schema import RolloutConfig
from mrl.models.fp8_scales import Fp8Form
from mrl.models.open_model import OpenSpec
from mrl.models.spec import ModelSpec

ONLINE_FP8 = ("fp8_per_tensor", "fp8_per_channel", "fp8_per_block")
"""Ways of vLLM that quantize unquantized weights. Scales have less than a hundredth of the bytes."""
FP8_BYTES = 1
_SENT_FORMS: dict[str, Fp8Form] = {"fp8_per_channel": "channel", "fp8_per_block": "block"}
_FP8_CACHES = ("fp8", "fp8_e4m3", "fp8_e5m2")
_GATES = r"re:.*\.(gate|router|shared_expert_gate)$"


def is_online_fp8(vllm: Mapping[str, Any]) -> bool:
    """Return whether these options of vLLM make FP8 of all linear layers."""
    return vllm.get("quantization") in ONLINE_FP8 and not vllm.get("quantization_config")


def gate_arguments(vllm: Mapping[str, Any]) -> dict[str, Any]:
    """Return vLLM's arguments that keep gates unquantized, unless the user says which layers are quantized."""
    return {"quantization_config": {"ignore": [_GATES]}} if is_online_fp8(vllm) else {}


def sent_form(rollout: RolloutConfig, spec: ModelSpec) -> Fp8Form | None:
    """Return the form of the scales if the trainer quantizes; None if vLLM does.

    A scale of a whole matrix covers queries, keys and values that different ranks hold. vLLM decodes latent attention
    with other forms of its weights. Linear attention and gpt-oss in FP8 have not been compared.
    """
    if not is_online_fp8(rollout.vllm) or isinstance(spec, OpenSpec) or spec.family == "gpt_oss":
        return None
    return None if spec.mla or spec.gdn else _SENT_FORMS.get(rollout.vllm["quantization"])


def shares_scales(rollout: RolloutConfig) -> bool:
    """Return whether vLLM's workers, if they quantize, compute scales together and must take layers in one order.

    The scales of blocks are the only ones that a worker computes from its own part of a matrix.
    """
    is_quantized = rollout.vllm.get("quantization") or rollout.vllm.get("quantization_config")
    is_by_block = is_online_fp8(rollout.vllm) and rollout.vllm["quantization"] == "fp8_per_block"
    return bool(is_quantized) and not is_by_block and rollout.tp > 1


def cache_bytes_per_element(vllm: Mapping[str, Any], item_bytes: int) -> int:
    """Return the bytes of an element of the keys and values in an engine's cache."""
    return FP8_BYTES if vllm.get("kv_cache_dtype") in _FP8_CACHES else item_bytes


def has_known_cache(vllm: Mapping[str, Any]) -> bool:
    """Return whether the size of the cache is known."""
    return vllm.get("kv_cache_dtype", "auto") in ("auto", *_FP8_CACHES)
