"""Modules of vLLM that quantize their weights to FP8 when they arrive: they are quantized again with each version.

vLLM's own update takes whole Hugging Face tensors, so that each device of an engine would get the whole model. Here a
module gets its fused and sharded tensors instead, and only the step in which vLLM quantizes them is vLLM's own. The
result is copied into the memory that kernels and captured graphs read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import Module
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

_LINEAR = (Fp8PerTensorOnlineLinearMethod, Fp8PerBlockOnlineLinearMethod, Fp8PtpcOnlineLinearMethod)
_EXPERTS = (Fp8PerTensorOnlineMoEMethod, Fp8PerBlockOnlineMoEMethod, Fp8PtpcOnlineMoEMethod)
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


def quantize(module: Module, received: Mapping[str, Tensor]) -> None:
    """Make vLLM quantize the received tensors of a module, and write the result where its kernels read."""
    info = get_layerwise_info(module)
    info.kernel_tensors = get_layer_params_buffers(module)
    info.kernel_non_persistent_buffers = set(module._non_persistent_buffers_set)
    restore_layer_on_meta(module, info)
    for name, tensor in received.items():
        form = getattr(module, name)
        tensor.__class__, tensor.__dict__ = form.__class__, form.__dict__.copy()  # as vLLM materializes a tensor
        setattr(module, name, tensor)
    materialize_layer(module, info)  # buffers
    if hasattr(module, _DONE):
        delattr(module, _DONE)
    module.quant_method.process_weights_after_loading(module)  # type: ignore[operator, union-attr]
    if hasattr(module, "update_param_tp_status"):
        module.update_param_tp_status()  # type: ignore[operator]
    _copy_and_restore_kernel_tensors(module, info)
    info.reset()
