"""Modules of vLLM that quantize their weights to FP8 when they arrive: they are quantized again with each version.

vLLM's own update takes whole Hugging Face tensors, so that each device of an engine would get the whole model. Here a
module gets its fused and sharded tensors instead, and only the step in which vLLM quantizes them is vLLM's own. The
result is copied into the memory that kernels and captured graphs read.

The trainer may have quantized the tensors already. Then they come with their scales, and vLLM only packs them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import Module
from vllm.model_executor.layers.fusion.quant_activation import expose_input_quant_key
from vllm.model_executor.layers.quantization.online.fp8 import (
    Fp8PerBlockOnlineLinearMethod,
    Fp8PerBlockOnlineMoEMethod,
    Fp8PerTensorOnlineLinearMethod,
    Fp8PerTensorOnlineMoEMethod,
    Fp8PtpcOnlineLinearMethod,
    Fp8PtpcOnlineMoEMethod,
)
from vllm.model_executor.model_loader.reload.layerwise import _copy_and_restore_kernel_tensors, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_layer, restore_layer_on_meta
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers
from vllm.model_executor.utils import replace_parameter

from mrl.errors import RolloutError
from mrl.models.fp8_scales import SCALE, Fp8Form

_LINEAR = (Fp8PerTensorOnlineLinearMethod, Fp8PerBlockOnlineLinearMethod, Fp8PtpcOnlineLinearMethod)
_EXPERTS = (Fp8PerTensorOnlineMoEMethod, Fp8PerBlockOnlineMoEMethod, Fp8PtpcOnlineMoEMethod)
_BY_BLOCK = (Fp8PerBlockOnlineLinearMethod, Fp8PerBlockOnlineMoEMethod)
_BY_TENSOR = (Fp8PerTensorOnlineLinearMethod, Fp8PerTensorOnlineMoEMethod)
_DONE = "_already_called_process_weights_after_loading"
"""vLLM's mark of a module that it has quantized."""


def is_quantized_on_arrival(module: Module) -> bool:
    """Return whether vLLM keeps this module in FP8, and can quantize unquantized weights of it."""
    return type(getattr(module, "quant_method", None)) in (*_LINEAR, *_EXPERTS)


def padding_reason(name: str, module: Module) -> str:
    """Return how vLLM pads the experts of a module, so that shards do not fit them; empty if it does not."""
    if type(module.quant_method) in _LINEAR:
        return ""
    moe: Any = module.moe_config
    real = (moe.hidden_dim_unpadded, moe.intermediate_size_per_partition_unpadded)
    padded = (moe.hidden_dim, moe.intermediate_size_per_partition)
    return "" if real == padded else f"the experts of {name} are padded from {list(real)} to {list(padded)}"


def takes_fp8(module: Module) -> Fp8Form | None:
    """Return the form of the scales with which a module can take weights in FP8; None if it cannot.

    A scale of a whole matrix, of queries, keys and values together, is nowhere known before they are in an engine.
    """
    method = type(getattr(module, "quant_method", None))
    if not is_quantized_on_arrival(module) or method in _BY_TENSOR:
        return None
    return "block" if method in _BY_BLOCK else "channel"


def load(module: Module, received: Mapping[str, Tensor]) -> None:
    """Make vLLM quantize the received tensors of a module, unless they are in FP8, and write the result where its
    kernels read."""
    info = get_layerwise_info(module)
    info.kernel_tensors = get_layer_params_buffers(module)
    info.kernel_non_persistent_buffers = set(module._non_persistent_buffers_set)
    restore_layer_on_meta(module, info)
    weights = {name: tensor for name, tensor in received.items() if not name.endswith(SCALE)}
    for name, tensor in weights.items():
        form = getattr(module, name)
        tensor.__class__, tensor.__dict__ = form.__class__, form.__dict__.copy()  # as vLLM materializes a tensor
        setattr(module, name, tensor)
    materialize_layer(module, info)  # buffers
    if hasattr(module, _DONE):
        delattr(module, _DONE)
    if len({tensor.dtype for tensor in weights.values()}) > 1:
        raise RolloutError("the trainer sends a part of the module's weights in FP8 and a part in another dtype")
    if any(name.endswith(SCALE) for name in received):
        _pack(module, {name: received[f"{name}{SCALE}"] for name in weights})
    else:
        module.quant_method.process_weights_after_loading(module)  # type: ignore[operator, union-attr]
    if hasattr(module, "update_param_tp_status"):
        module.update_param_tp_status()  # type: ignore[operator]
    _copy_and_restore_kernel_tensors(module, info)
    info.reset()


def _pack(module: Module, scales: Mapping[str, Tensor]) -> None:
    """Do what follows in vLLM after it has quantized the weights of a module."""
    method: Any = module.quant_method
    if type(method) in _EXPERTS:
        module.w13_input_scale = module.w2_input_scale = None  # type: ignore[assignment]
        module.weight_block_size = method.weight_block_size
        both = scales["w13_weight"], scales["w2_weight"]
        method._setup_kernel(module, module.w13_weight, module.w2_weight, *both, None, None)
        return
    weight: Any = module.weight
    module.input_scale = None  # type: ignore[assignment]
    if type(method) in _BY_BLOCK:
        replace_parameter(module, "weight", weight.data)
        replace_parameter(module, "weight_scale_inv", scales["weight"])
    else:
        replace_parameter(module, "weight", weight.data.t())
        replace_parameter(module, "weight_scale", scales["weight"])
    method.fp8_linear.process_weights_after_loading(module)
    if type(method) not in _BY_BLOCK:
        expose_input_quant_key(module, method.fp8_linear)
